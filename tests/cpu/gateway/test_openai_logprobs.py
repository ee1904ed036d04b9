"""Log-probabilities in both formats: exact bytes, parts of characters, offsets into the text."""

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from tokenizers import decoders

from kvforge.common.refusals import Refusal
from kvforge.gateway.answers.logprobs import ChatLogprobs, CompletionLogprobs
from kvforge.gateway.token_bytes import TokenBytes
from kvforge.runtime.requests.outputs import TokenLogprobs
from kvforge.serving.contract.failures import failed
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


def test_echo(client: openai.OpenAI, triton: FakeTriton) -> None:
    """The prompt's numbers come before the generated ones, in one list; the first token has none."""
    triton.script = lambda request: bytes_of("!", request)
    ask = {"model": "tiny", "prompt": ["aé", "b"], "logprobs": 1, "echo": True, "n": 2}
    choices = client.completions.create(**ask).choices
    assert [choice.text for choice in choices] == ["aé!", "aé!", "b!", "b!"]
    for choice in choices[:2]:
        found = choice.logprobs
        assert found.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
        assert found.token_logprobs == [None, -(0xC3 + 3) / 8, -(0xA9 + 3) / 8, -0.5]
        assert found.top_logprobs[0] is None
        assert set(found.top_logprobs[1].values()) == {-(0xC3 + 3) / 8, -(0xC3 + 4) / 16}
        assert found.text_offset == [0, 1, 1, 2]
    assert [choice.logprobs.tokens for choice in choices[2:]] == [["b", "!"]] * 2
    assert choices[2].logprobs.token_logprobs == [None, -0.5]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**{**ask, "n": 1}, stream=True)]
    for index in (0, 1):
        parts = [choice.logprobs for choice in chunks if choice.index == index and choice.logprobs]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for part in parts for value in getattr(part, name)]
            assert joined == getattr(choices[2 * index].logprobs, name)


def test_a_prompt_alone(client: openai.OpenAI, triton: FakeTriton) -> None:
    """As evaluations ask: nothing generated comes back, though a token must be."""
    triton.script = lambda request: bytes_of("!", request)
    answer = client.completions.create(model="tiny", prompt="ab", max_tokens=0, echo=True, logprobs=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "length")
    assert answer.choices[0].logprobs.token_logprobs == [None, -(ord("b") + 3) / 8]
    assert answer.usage.completion_tokens == 0
    streamed = client.completions.create(model="tiny", prompt="ab", max_tokens=0, echo=True, logprobs=0, stream=True)
    chunks = [chunk.choices[0] for chunk in streamed]
    assert [chunk.text for chunk in chunks] == ["ab", ""]
    assert chunks[-1].logprobs.tokens == ["a", "b"]


def test_prompt_logprobs_as_vllm_writes_them(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.script = lambda request: bytes_of("!", request)
    more = {"prompt_logprobs": 1}
    answer = client.completions.create(model="tiny", prompt="ab", extra_body=more)
    b = ord("b") + 3
    entry = {
        str(b): {"logprob": -b / 8, "rank": b, "decoded_token": "b"},
        str(b + 1): {"logprob": -(b + 1) / 16, "rank": 1, "decoded_token": "c"},
    }
    assert answer.choices[0].prompt_logprobs == [None, entry]
    assert answer.choices[0].text == "!" and answer.choices[0].logprobs is None
    messages = [{"role": "user", "content": "ab"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, extra_body=more)
    num_tokens = chat.usage.prompt_tokens
    assert len(chat.prompt_logprobs) == num_tokens and chat.prompt_logprobs[0] is None
    assert chat.choices[0].message.content == "!"
    plain = client.chat.completions.create(model="tiny", messages=messages)
    assert "prompt_logprobs" not in plain.model_extra


def test_a_chat_holds_its_prompts_once(start: Callable[..., str], triton: FakeTriton) -> None:
    """All choices have the same prompt, which the answer speaks of once."""
    triton.script = lambda request: bytes_of("!", request)
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "a" * 200}], "extra_body": {"prompt_logprobs": 0}}
    client = openai.OpenAI(base_url=f"{start(max_answer_bytes=40_000)}/v1", api_key="none", max_retries=0)
    one, eight = (client.chat.completions.create(**ask, n=n) for n in (1, 8))
    assert len(eight.choices) == 8
    assert len(one.prompt_logprobs) > 200 and one.prompt_logprobs == eight.prompt_logprobs


@pytest.mark.parametrize("more", [{}, {"max_tokens": 0}, {"best_of": 2}])
def test_prompt_logprobs_beside_a_prompt_that_is_repeated_without(
    client: openai.OpenAI, triton: FakeTriton, more: dict
) -> None:
    triton.script = lambda request: bytes_of("!", request)
    answer = client.completions.create(model="tiny", prompt="ab", echo=True, extra_body={"prompt_logprobs": 0, **more})
    (choice,) = answer.choices
    assert choice.text == ("ab" if more == {"max_tokens": 0} else "ab!") and choice.logprobs is None
    assert [entry and list(entry) for entry in choice.prompt_logprobs] == [None, [str(ord("b") + 3)]]


def test_long_prompts_come_in_pieces(client: openai.OpenAI, triton: FakeTriton) -> None:
    """Other requests get their turn between them, and nothing is lost where they meet."""
    triton.script = lambda request: bytes_of("!", request)
    text = "".join(chr(33 + index % 90) for index in range(200))
    found = client.completions.create(model="tiny", prompt=text, echo=True, logprobs=20, max_tokens=1).choices[0]
    assert found.logprobs.tokens == [*text, "!"]
    assert found.logprobs.token_logprobs[1:-1] == [-(ord(letter) + 3) / 8 for letter in text[1:]]
    assert all(len(top) == 21 for top in found.logprobs.top_logprobs[1:-1])


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True, "echo": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_refused_of_prompts(client: openai.OpenAI, triton: FakeTriton, more: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="ab", extra_body=more)
    assert error.value.param == param
    assert triton.requests == []


@pytest.mark.parametrize(
    ("more", "field"), [({"prompt_logprobs": 1}, "prompt_logprobs"), ({"echo": True, "logprobs": 1}, "echo")]
)
def test_an_engine_that_has_none_is_heard(client: openai.OpenAI, triton: FakeTriton, more: dict, field: str) -> None:
    """The engine's own refusal, in the words of the request."""

    async def refuse(request):
        reason = "cannot be given, because the KV policy snapkv counts the attention of all that goes past the cut"
        yield failed("refused", Refusal(reason, field="prompt_logprobs", operator="use an engine without it"))

    triton.script = refuse
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="ab", extra_body=more)
    assert error.value.param == field
    assert "because the KV policy snapkv counts the attention" in error.value.message
    assert "use an engine" not in error.value.message


@pytest.mark.parametrize(
    ("make", "ids", "echo", "offsets"),
    [
        (byte_level, ["<s>", "</s>", "a", "<s>", "b"], "</s>a<s>b", [0, 0, 4, 5, 8]),
        (byte_fallback, ["<s>", "▁The", "▁fox"], "The fox", [0, 0, 3]),
        (byte_fallback, ["▁", "▁The"], " The", [0, 1]),
    ],
)
def test_offsets_into_a_repeated_prompt(make, ids: list[str], echo: str, offsets: list[int]) -> None:
    """Special tokens count where the prompt has them written out, a space that the tokenizer puts first does not."""
    tokenizer = make()
    logprobs = CompletionLogprobs(TokenBytes(tokenizer, decoder_of(tokenizer)), echo)
    first, *rest = [tokenizer.backend.token_to_id(token) for token in ids]
    logprobs.add_first(first)
    logprobs.add([TokenLogprobs(token, -1.0, 1, {}) for token in rest])
    assert json.loads(b"".join(logprobs.take()))["text_offset"] == offsets


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
