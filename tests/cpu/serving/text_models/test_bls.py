"""The text server behind `ensemble` and `tensorrt_llm_bls`: what it answers."""

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.contract.text_rows import REQUEST_END, SEQUENCE_END
from kvforge.serving.text_models.bls import MAX_PIECES
from kvforge.serving.text_models.lanes import SHORT_BYTES
from tests.support.models.text_tokenizers import PANICKING_TEXT, panicking_decoder
from tests.support.serving.text_triton import (
    FINAL_FLAG,
    LIMIT_US,
    Say,
    Sender,
    Triton,
    failed,
    make_request,
    make_server,
    serve,
    three_pieces,
    wait,
)


@pytest.mark.parametrize(("accumulate", "texts"), [(False, ["a", "b", "c"]), (True, ["a", "ab", "abc"])])
def test_pieces_or_the_whole_text_so_far(tmp_path: Path, accumulate: bool, texts: list[str]) -> None:
    top_k = np.array([[7]], np.int32)
    triton, sender = serve(tmp_path, three_pieces(tmp_path), accumulate, top_k=top_k)
    assert sender.texts == texts
    assert [flags for _, flags in sender.sent] == [0, 0, FINAL_FLAG]
    assert [tensor.name() for tensor in sender.sent[0][0].output_tensors()] == ["text_output", "sequence_index"]
    (call,) = triton.calls
    inputs = {tensor.name(): tensor.as_numpy() for tensor in call["inputs"]}
    assert inputs["runtime_top_k"] is top_k
    assert inputs["request_output_len"].tolist() == [[4]]
    assert (call["request_id"], call["parameters"]["errors_as_tensors"]) == ("mine", True)
    assert 0 < call["parameters"]["timeout"] < LIMIT_US  # what is left of it


@pytest.mark.parametrize("interval", [0, 1, 8])
@pytest.mark.parametrize("accumulate", [False, True])
def test_random_answers_beside_each_other(tmp_path: Path, accumulate: bool, interval: int) -> None:
    """Rows of all requests in random order from one thread, as the link's, while sender threads take turns: each
    answer is whole, or ends in its error behind what there was, or in that of a client that has gone; and once."""
    rng = random.Random(interval)

    class Hasty(Sender):
        def send(self, response: Any = None, flags: int = 0) -> None:
            time.sleep(rng.choice((0, 0, 1e-4)))
            super().send(response, flags)

    ends = ("whole", "failed", "cancelled", "whole")
    scripts: dict[int, threading.Event] = {}
    inputs_of: dict[int, dict] = {}

    def script(triton: Triton, inputs: dict, say: Say) -> Iterator[SimpleNamespace]:
        number = int(inputs["runtime_top_k"][0, 0])
        inputs_of[number] = inputs
        assert scripts[number].wait(60)
        if ends[number] == "whole":
            yield triton.InferenceResponse([])
        else:
            outcome = "lost" if ends[number] == "failed" else "cancelled"
            yield failed(triton, outcome, f"request {number}")

    triton, server = make_server(tmp_path, script, accumulate, interval)
    senders = [Hasty() for _ in ends]
    counts = [rng.randrange(2 * MAX_PIECES, 5 * MAX_PIECES) for _ in ends]
    scripts.update((number, threading.Event()) for number in range(len(ends)))
    top_k = [np.array([[number]], np.int32) for number in range(len(ends))]
    server.execute([make_request(sender, top_k=k) for sender, k in zip(senders, top_k, strict=True)])
    wait(lambda: len(inputs_of) == len(ends))
    order = [number for number, count in enumerate(counts) for _ in range(count)]
    rng.shuffle(order)
    left = list(counts)
    for number in order:
        left[number] -= 1
        is_last = not left[number] and ends[number] == "whole"
        triton.say(inputs_of[number], [65 + number], SEQUENCE_END | REQUEST_END if is_last else 0)
        if not left[number]:
            scripts[number].set()
    wait(lambda: server._admission.num_open == 0)
    assert server._open == {}
    server.close()
    for number, (end, sender) in enumerate(zip(ends, senders, strict=True)):
        assert [flags for _, flags in sender.sent].index(FINAL_FLAG) == len(sender.sent) - 1
        responses = [response for response, _ in sender.sent if response.error() is None]
        pieces = [response.output_tensors()[0].as_numpy().item().decode() for response in responses]
        letter = server._tokenizer.decode([65 + number])
        text = (pieces or [""])[-1] if accumulate else "".join(pieces)
        assert text == letter * (len(text) // len(letter)), "its own tokens alone"
        assert (len(text) == counts[number] * len(letter)) or (end == "cancelled")
        assert (sender.error is None) == (end == "whole")
        if end != "whole":
            assert sender.error.message() == f"request {number}"


def test_an_error_behind_a_response_arrives_behind_it(tmp_path: Path) -> None:
    def script(triton: Triton, inputs: dict, say: Say) -> list[SimpleNamespace]:
        say(inputs, [65], 0)
        return [triton.InferenceResponse([]), failed(triton, "lost", "the engine died")]

    _, sender = serve(tmp_path, script)
    assert len(sender.sent) == 2
    assert (sender.error.message(), sender.error.code()) == ("the engine died", Triton.TritonError.UNAVAILABLE)
    assert sender.sent[-1][1] == FINAL_FLAG


def test_an_error_after_the_last_token_is_none(tmp_path: Path) -> None:
    def script(triton: Triton, inputs: dict, say: Say) -> list[SimpleNamespace]:
        say(inputs, [65], SEQUENCE_END | REQUEST_END)
        return [failed(triton, "lost", "the engine died")]

    _, sender = serve(tmp_path, script)
    assert [flags for _, flags in sender.sent] == [FINAL_FLAG] and sender.error is None


def test_an_answer_that_cannot_be_sent_ends_in_an_error(tmp_path: Path) -> None:
    class Full(Sender):
        def send(self, response: Any = None, flags: int = 0) -> None:
            if response.error() is None:
                raise RuntimeError("no room")
            super().send(response, flags)

    for flags in (0, SEQUENCE_END | REQUEST_END):

        def script(triton: Triton, inputs: dict, say: Say, flags: int = flags) -> list[SimpleNamespace]:
            say(inputs, [65], flags)
            return []

        triton, sender = serve(tmp_path, script, sender=Full())
        assert len(sender.sent) == 1 and "no room" in sender.error.message()
        assert len(triton.cancelled) == 1


def test_a_lost_connection_ends_what_runs(tmp_path: Path) -> None:
    def script(triton: Triton, inputs: dict, say: Say) -> list[SimpleNamespace]:
        say._server._on_lost()
        return []

    _, sender = serve(tmp_path, script)
    assert sender.error.code() == Triton.TritonError.UNAVAILABLE


def test_tokens_that_cannot_be_shown_end_their_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = panicking_decoder()
    (bad,), fine = tokenizer.encode(PANICKING_TEXT), tokenizer.encode("fox")
    monkeypatch.setattr("kvforge.serving.text_models.bls.tokenizer_of", lambda *arguments: tokenizer)

    def script(triton: Triton, inputs: dict, say: Say) -> list[SimpleNamespace]:
        say(inputs, fine, 0)
        say(inputs, [bad], SEQUENCE_END | REQUEST_END)
        return []

    triton, sender = serve(tmp_path, script)
    assert "cannot be shown as text" in sender.error.message()
    assert len(sender.sent) == 2 and len(triton.cancelled) == 1


def test_a_refusal_keeps_its_code(tmp_path: Path) -> None:
    def script(triton: Triton, inputs: dict, say: Say) -> list[SimpleNamespace]:
        return [triton.InferenceResponse([], Triton.TritonError("full", Triton.TritonError.UNAVAILABLE))]

    _, sender = serve(tmp_path, script)
    assert (sender.error.message(), sender.error.code()) == ("full", Triton.TritonError.UNAVAILABLE)


def test_an_engine_that_says_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvforge.serving.text_models.bls.LATE_S", 0.0)
    _, sender = serve(tmp_path, lambda triton, inputs, say: [])
    assert "without an answer" in sender.error.message()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [({"text_input": np.array([[b""]], object)}, "prompt is empty"),
     ({"num_draft_tokens": np.array([[3]], np.int32)}, "'num_draft_tokens' cannot be used")],
)  # fmt: skip
def test_refusals_never_reach_the_engine(tmp_path: Path, inputs: dict, words: str) -> None:
    triton, sender = serve(tmp_path, lambda triton, inputs, say: [], **inputs)
    assert triton.calls == []
    assert words in sender.error.message()
    assert sender.error.code() == Triton.TritonError.INVALID_ARG


class Responses:
    """An iterator as Triton's, which counts what was taken from it."""

    def __init__(self, responses: list[SimpleNamespace]) -> None:
        self.left = responses

    def __iter__(self) -> "Responses":
        return self

    def __next__(self) -> SimpleNamespace:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


def test_a_call_is_taken_to_its_end_and_outlives_its_answer(tmp_path: Path) -> None:
    """What Triton does with a call that is dropped too early, or never taken to its end: bls.LINGER_S."""
    made: list[weakref.ref[Responses]] = []

    def script(triton: Triton, inputs: dict, say: Say) -> Responses:
        broken = SimpleNamespace()  # the answer fails here
        responses = Responses([broken, triton.InferenceResponse([])])
        made.append(weakref.ref(responses))
        return responses

    _, sender = serve(tmp_path, script)
    assert "has_error" in sender.error.message()
    gc.collect()
    (kept,) = made
    call = kept()
    assert call is not None and call.left == []


class EndedError(BaseException):
    """As a panic: no Exception."""


@pytest.mark.parametrize("text", [b"Hi", b"x" * (SHORT_BYTES + 1)])
@pytest.mark.parametrize("error", [EndedError("/a/path"), SystemExit("/a/path"), KeyError("k")])
def test_whatever_fails_the_request_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, error: BaseException
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(Tokenizer, "encode", fail)
    triton, sender = serve(tmp_path, lambda triton, inputs, say: [], text_input=np.array([[text]], object))
    assert triton.calls == []
    assert len(sender.sent) == 1
    assert sender.error.code() == Triton.TritonError.INTERNAL
    assert sender.error.message().startswith("the request failed")
    assert "path" not in sender.error.message()


def test_a_long_text_is_answered_as_a_short_one(tmp_path: Path) -> None:
    text = np.array([[b"x" * (SHORT_BYTES + 1)]], object)
    triton, sender = serve(tmp_path, three_pieces(tmp_path), text_input=text)
    assert sender.texts == ["a", "b", "c"]
    (call,) = triton.calls
    assert {t.name(): t.as_numpy() for t in call["inputs"]}["input_lengths"].item() == SHORT_BYTES + 1
