"""Answers are written as tokens come: the same JSON as from whole lists, a bounded number of tokens at a time, bounded
bytes of one and of all."""

import asyncio
import codecs
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvforge.gateway.answers.generation import LOGPROBS_AT_ONCE, TOKENS_AT_ONCE, Generation
from kvforge.gateway.answers.logprobs import ChatLogprobs, CompletionLogprobs
from kvforge.gateway.errors import ApiError
from kvforge.gateway.http import held_answers
from kvforge.gateway.http.held_answers import HeldAnswer, HeldAnswers
from kvforge.gateway.token_bytes import TokenBytes
from kvforge.runtime.requests.outputs import TokenLogprobs
from kvforge.runtime.text.stream import TextStream
from tests.cpu.gateway.fake_triton import FakeTriton, Row
from tests.cpu.gateway.http_calls import COMPLETION, connect, post, send_request, wait_until
from tests.cpu.gateway.test_openai_logprobs import decoder_of
from tests.support.models.text_tokenizers import byte_level

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


def name_of(raw: bytes, prefix: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_of(entries: list[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, list]:
    """OpenAI's lists, from all entries at once."""
    offset, offsets, decoder = 0, [], codecs.getincrementaldecoder("utf-8")("replace")
    for entry in entries:
        offsets.append(offset)
        if not token_bytes.is_special(entry.token_id):
            offset += len(decoder.decode(token_bytes[entry.token_id]))

    def name(token: int) -> str:
        return name_of(token_bytes[token], "bytes:")

    return {
        "tokens": [name(entry.token_id) for entry in entries],
        "token_logprobs": [max(entry.logprob, -9999.0) for entry in entries],
        "top_logprobs": [
            {name(token): max(value, -9999.0) for token, value in {**entry.top, entry.token_id: entry.logprob}.items()}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def chat_of(entries: list[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, Any]:
    def one(token: int, value: float) -> dict[str, Any]:
        raw = token_bytes[token]
        return {"token": name_of(raw, ""), "logprob": max(value, -9999.0), "bytes": list(raw)}

    content = [
        {**one(entry.token_id, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top.items()]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


@pytest.mark.parametrize("seed", range(20))
def test_written_piece_by_piece_it_is_the_same(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = byte_level()
    token_bytes = TokenBytes(tokenizer, decoder_of(tokenizer))
    size = tokenizer.backend.get_vocab_size()

    def number() -> float:
        return rng.choice([-float("inf"), -0.0, 0.0, -rng.random(), -rng.random() * 1e-9, -rng.random() * 1e4])

    entries = [
        TokenLogprobs(rng.randrange(size + 5), number(), 0, {rng.randrange(size): number() for _ in range(seed % 4)})
        for _ in range(rng.randrange(60))
    ]
    compact = {"ensure_ascii": False, "separators": (",", ":")}
    for written, wanted in (
        (CompletionLogprobs(token_bytes), completion_of(entries, token_bytes)),
        (ChatLogprobs(token_bytes), chat_of(entries, token_bytes)),
    ):
        at = 0
        while at < len(entries):
            step = rng.randrange(1, 9)
            written.add(entries[at : at + step])
            at += step
        assert written.num_bytes <= len(json.dumps(wanted, **compact))
        assert b"".join(written.take()).decode() == json.dumps(wanted, **compact)
        assert written.num_bytes == 0


def wordy(num_tokens: int, k: int) -> Callable:
    async def script(request):
        for sequence in range(
            request.value("num_return_sequences") if "num_return_sequences" in request.tensors else 1
        ):
            tokens = [97 + 3 + index % 26 for index in range(num_tokens)]
            top = [{100 + other: -1.5 - other for other in range(k)}] * num_tokens
            yield Row(tokens, sequence, [-0.5] * num_tokens, top, "length", None, 0)

    return script


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_long_answers_give_others_their_turn(
    url: str, triton: FakeTriton, monkeypatch, path: str, stream: bool
) -> None:
    """However many tokens a response gathered, few are made into text or JSON at once."""
    slices: list[int] = []
    push = TextStream.push

    def watch(self: TextStream, output: Any) -> str:
        slices.append(len(output.new_token_ids))
        return push(self, output)

    monkeypatch.setattr(TextStream, "push", watch)
    triton.script = wordy(3000, 20)
    ask = {"logprobs": True, "top_logprobs": 20} if path != "completions" else {"logprobs": 20}
    body = {**(COMPLETION if path == "completions" else CHAT), **ask, "n": 2, "max_tokens": 3000, "stream": stream}
    answer = post(f"{url}/v1/{path}", body)
    assert answer.status == 200
    assert sum(slices) == 6000 and max(slices) <= min(TOKENS_AT_ONCE, LOGPROBS_AT_ONCE // 21)
    texts = ["", ""]
    counts = [0, 0]
    if not stream:
        assert int(answer.headers["content-length"]) == len(answer.body.encode())
    bodies = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith("data: {")]
    for choice in (choice for body in (bodies if stream else [json.loads(answer.body)]) for choice in body["choices"]):
        index = choice["index"]
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text", "")}
        texts[index] += said["content"]
        if choice["logprobs"]:
            counts[index] += len(choice["logprobs"].get("content") or choice["logprobs"].get("tokens"))
    assert texts == ["".join(chr(97 + index % 26) for index in range(3000))] * 2 and counts == [3000, 3000]
    longest = max(map(len, answer.body.splitlines()))
    assert not stream or longest < 600_000


def test_an_answer_has_a_largest_size(start: Callable[..., str], triton: FakeTriton) -> None:
    url = start(max_answer_bytes=100_000)
    triton.script = wordy(3000, 20)
    body = {**COMPLETION, "logprobs": 20, "max_tokens": 3000}
    error = json.loads((answer := post(f"{url}/v1/completions", body)).body)["error"]
    assert answer.status == 400 and error["code"] == "answer_too_large" and "set stream to true" in error["message"]
    assert post(f"{url}/v1/completions", {**body, "stream": True}).status == 200
    assert post(f"{url}/v1/completions", {**body, "logprobs": None}).status == 200


def test_all_answers_have_a_largest_size_and_give_it_back() -> None:
    whole = HeldAnswers(100)
    shares = [whole.one() for _ in range(held_answers.ALL + 1)]
    for share in shares[:-1]:
        share.set(90)
        share.set(100)
    with pytest.raises(ApiError) as found:
        shares[-1].set(10)
    assert found.value.status == 429
    with pytest.raises(ApiError) as found:
        shares[0].set(101)
    assert found.value.status == 400
    for share in shares:
        share.release()
        share.release()
    assert whole.num_bytes == 0
    shares[0].set(50)
    assert whole.num_bytes == 50


async def endless(request):
    while True:
        yield Row([100], 0, [-0.5], [{}])
        await asyncio.sleep(0.01)


def test_what_answers_hold_is_given_back(start: Callable[..., str], triton: FakeTriton, monkeypatch) -> None:
    """Whether they end well, with an error, or their client goes away."""
    made: list[HeldAnswers] = []
    one = HeldAnswers.one

    def watch(self: HeldAnswers) -> HeldAnswer:
        made.append(self)
        return one(self)

    monkeypatch.setattr(HeldAnswers, "one", watch)
    url = start(max_answer_bytes=50_000)
    triton.script = wordy(100, 20)
    for tokens in (100, 3000):
        triton.script = wordy(tokens, 20)
        post(f"{url}/v1/completions", {**COMPLETION, "logprobs": 20, "max_tokens": 3000})
    assert len({id(each) for each in made}) == 1
    wait_until(lambda: made[0].num_bytes == 0)  # given back once the client has its answer

    triton.script = endless
    with connect(url) as sock:
        send_request(sock, {**COMPLETION, "logprobs": 0, "n": 2, "prompt": ["a", "b"]})
        wait_until(lambda: len(made) == 3)
    wait_until(lambda: all(request.cancelled for request in triton.requests[2:]))
    wait_until(lambda: made[0].num_bytes == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_panic_while_an_answer_is_written_ends_that_answer(
    url: str, triton: FakeTriton, monkeypatch, stream: bool
) -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def fail(self: Generation, *args: object) -> None:
        raise panic("index out of bounds at /root/.cargo/registry")

    usual = triton.script
    with monkeypatch.context() as patched:
        patched.setattr(Generation, "_slices", fail)
        if stream:
            triton.script = endless
        answer = post(f"{url}/v1/completions", {**COMPLETION, "stream": stream})
        assert answer.status == 500 and "tokenizer fails" in answer.body and "cargo" not in answer.body
    wait_until(lambda: triton.requests[0].cancelled or not stream)
    triton.script = usual
    assert post(f"{url}/v1/completions", COMPLETION).status == 200
