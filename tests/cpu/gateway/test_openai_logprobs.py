"""Log-probabilities in both formats: exact bytes, parts of characters, offsets into the text."""

import json
import math
import tempfile
from pathlib import Path

import openai
import pytest
from tokenizers import decoders

from kvforge.gateway.logprobs import ChatLogprobs, CompletionLogprobs
from kvforge.gateway.token_bytes import TokenBytes
from kvforge.runtime.requests.outputs import TokenLogprobs
from tests.cpu.gateway.fake_triton import FakeTriton, bytes_of
from tests.support.models.text_tokenizers import TEXT, byte_fallback, byte_level


def decoder_of(tokenizer) -> dict:

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.backend.save(str(path))
        return json.loads(path.read_text())["decoder"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_tokens_join_to_the_text(make) -> None:
    tokenizer = make()
    token_bytes = TokenBytes(tokenizer, decoder_of(tokenizer))
    for text in TEXT:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(token_bytes[token] for token in ids)
        assert joined.decode().removeprefix(" ") == text
    assert token_bytes[2] == b"</s>" and token_bytes.is_special(2) and not token_bytes.is_special(20)


def test_other_decoders_give_the_text_of_the_token() -> None:
    tokenizer = byte_level()
    tokenizer.backend.decoder = decoders.WordPiece()
    assert TokenBytes(tokenizer, {"type": "WordPiece"})[tokenizer.backend.token_to_id("q")] == b"q"


def test_completion_format(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.script = lambda request: bytes_of("aé!", request)
    logprobs = client.completions.create(model="tiny", prompt="x", logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}
    assert logprobs.text_offset == [0, 1, 1, 2]
    # A stream says the same, piece by piece, and leaves nothing out while a character is incomplete.
    chunks = list(client.completions.create(model="tiny", prompt="x", logprobs=2, stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == ["a", "", "é", "!"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for chunk in chunks for value in getattr(chunk.choices[0].logprobs, name)]
        assert joined == getattr(logprobs, name)


def test_chat_format(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.script = lambda request: bytes_of("é!", request)
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    entries = client.chat.completions.create(**ask, top_logprobs=2).choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["\\xc3", "\\xa9", "!"]
    assert [entry.bytes for entry in entries] == [[0xC3], [0xA9], [0x21]]
    assert [(top.token, top.logprob) for top in entries[2].top_logprobs] == [("!", -0.5), ('"', -1.5)]
    chunks = client.chat.completions.create(**ask, top_logprobs=2, stream=True)
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == entries
    alone = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in alone] == [[], [], []]
    assert "num_top_log_probs" in triton.requests[-1].tensors


def test_impossible_tokens_have_a_number() -> None:
    tokenizer = byte_level()
    token_bytes = TokenBytes(tokenizer, decoder_of(tokenizer))
    entry = TokenLogprobs(20, -math.inf, 1, {21: -math.inf})
    chat, lists = ChatLogprobs(token_bytes), CompletionLogprobs(token_bytes)
    for each in (chat, lists):
        each.add([entry])
    assert json.loads(b"".join(chat.take()))["content"][0]["logprob"] == -9999.0
    written = json.loads(b"".join(lists.take()))
    assert written["token_logprobs"] == [-9999.0] and set(written["top_logprobs"][0].values()) == {-9999.0}
