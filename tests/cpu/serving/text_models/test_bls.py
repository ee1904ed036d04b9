"""The text server behind `ensemble` and `tensorrt_llm_bls`, with a Triton and a stub that answer from a list."""

import gc
import itertools
import json
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
from kvforge.serving.contract.text_rows import REQUEST_END, SEQUENCE_END, RowMessage, read_rows
from kvforge.serving.engine.protocol import BLOB
from kvforge.serving.options import ModelOptions, write_serve_file
from kvforge.serving.stub.sender_pool import SenderPool
from kvforge.serving.text_models.bls import MAX_PIECES, TextServer
from kvforge.serving.text_models.lanes import SHORT_BYTES
from kvforge.serving.triton_config import TritonConfig
from tests.support.models.checkpoints import write_byte_tokenizer
from tests.support.models.text_tokenizers import PANICKING_TEXT, panicking_decoder

FINAL_FLAG = 1
LIMIT_US = 60_000_000


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class Triton:
    """triton_python_backend_utils; `script(triton, inputs, say)` makes the engine's responses, and says rows."""

    Tensor = Tensor
    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL_FLAG

    class TritonError:
        INVALID_ARG, UNAVAILABLE, INTERNAL, CANCELLED = range(4)

        def __init__(self, message: str, code: int) -> None:
            self.message_, self.code_ = message, code

        def message(self) -> str:
            return self.message_

        def code(self) -> int:
            return self.code_

    def __init__(self, script: Any) -> None:
        self.script, self.calls = script, []
        self.say: Any = None
        self.cancelled: list[int] = []
        self.told_open: list[int] = []

    def InferenceResponse(self, output_tensors: list[Tensor], error: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            output_tensors=lambda: output_tensors, has_error=lambda: error is not None, error=lambda: error
        )

    def InferenceRequest(self, **fields: Any) -> SimpleNamespace:
        self.calls.append(fields)
        inputs = {tensor.name(): tensor.as_numpy() for tensor in fields["inputs"]}
        return SimpleNamespace(exec=lambda decoupled: self.script(self, inputs, self.say))

    @staticmethod
    def get_input_tensor_by_name(request: Any, name: str) -> Tensor | None:
        return Tensor(name, request.inputs[name]) if name in request.inputs else None


class Sender:
    def __init__(self) -> None:
        self.sent: list[tuple[Any, int]] = []
        self.gone = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        return self.gone

    @property
    def texts(self) -> list[str]:
        return [response.output_tensors()[0].as_numpy().item().decode() for response, _ in self.sent]

    @property
    def error(self) -> Any:
        return self.sent[-1][0].error()


class Say:
    """Rows of the one request, as the stub sends them."""

    def __init__(self, server: TextServer) -> None:
        self._server = server

    def __call__(self, inputs: dict, tokens: list[int], flags: int, **arrays: np.ndarray) -> None:
        message = RowMessage()
        message.add(int(inputs["stream_key"][0, 0]), 0, flags, tokens, [], arrays)
        self._server._on_rows(read_rows({**message.message, BLOB: b"".join(message.blobs)}))


def failed(triton: Triton, outcome: str, message: str) -> SimpleNamespace:
    reason = json.dumps({"outcome": outcome, "message": message, "refusal": None}).encode()
    arrays = {"finish_reason": np.array([[b"error"]], object), "stop_reason": np.array([[reason]], object)}
    return triton.InferenceResponse([Tensor(name, array) for name, array in arrays.items()])


def make_server(folder: Path, script: Any, accumulate: bool = False, interval: int = 1) -> tuple[Triton, TextServer]:
    """The connection to the stub is one that takes everything."""
    write_byte_tokenizer(folder)
    parameters = {"accumulate_tokens": str(accumulate), "tokenizer_dir": str(folder), "run_dir": str(folder)}
    write_serve_file(ModelOptions(max_queue_size=2, max_request_bytes=10000, stream_interval=interval), folder)
    names = ("text_input", "max_tokens", "top_k", "stream", "num_draft_tokens")
    config = {
        "max_batch_size": 2,
        "model_transaction_policy": {"decoupled": True},
        "input": [{"name": name} for name in names],
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }
    triton = Triton(script)
    args = {"model_config": json.dumps(config), "model_name": "ensemble", "model_version": "1"}
    server = TextServer(triton, TritonConfig.of(args))
    triton.say = Say(server)
    server._link = SimpleNamespace(
        connect=lambda: None, tell_open=triton.told_open.append, cancel=triton.cancelled.append, close=lambda: None
    )
    return triton, server


def make_request(sender: Sender, limit_us: int = LIMIT_US, **inputs: np.ndarray) -> SimpleNamespace:
    tensors = {"text_input": np.array([[b"Hi"]], object), "max_tokens": np.array([[4]], np.int32), **inputs}
    return SimpleNamespace(
        inputs=tensors, get_response_sender=lambda: sender, parameters=lambda: "", timeout=lambda: limit_us,
        request_id=lambda: "mine", requested_output_names=lambda: ["text_output", "sequence_index"],
    )  # fmt: skip


def serve(
    folder: Path, script: Any, accumulate: bool = False, interval: int = 1, sender: Any = None, **inputs: np.ndarray
) -> tuple[Triton, Sender]:
    """One request, to its end."""
    triton, server = make_server(folder, script, accumulate, interval)
    sender = sender or Sender()
    server.execute([make_request(sender, **inputs)])
    while server._admission.num_open:
        time.sleep(0.001)
    server._room.close(5.0)
    assert server._open == {}
    server.close()
    return triton, sender


def three_pieces(tokenizer_folder: Path) -> Any:
    def script(triton: Triton, inputs: dict, say: Say) -> list[SimpleNamespace]:
        tokenizer = Tokenizer.from_dir(tokenizer_folder)
        assert tokenizer is not None
        a, b, c = tokenizer.encode("abc", add_special_tokens=False)
        say(inputs, [a], 0, sequence_index=np.array([[0]], np.int32))
        say(inputs, [b], 0)
        say(inputs, [c], SEQUENCE_END | REQUEST_END)
        return [triton.InferenceResponse([])]

    return script


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


def test_tokens_that_come_as_fast_as_they_leave_do_not_hold_up_others(tmp_path: Path) -> None:
    class Endless(Sender):
        """For each response that leaves another row comes, until the other request has had its end."""

        inputs: dict

        def send(self, response: Any = None, flags: int = 0) -> None:
            super().send(response, flags)
            if flags != FINAL_FLAG:
                triton.say(self.inputs, [65], SEQUENCE_END | REQUEST_END if other.sent else 0)

    def script(triton: Triton, inputs: dict, say: Say) -> list[SimpleNamespace]:
        if len(triton.calls) == 1:
            endless.inputs = inputs
            say(inputs, [65], 0)
            return []
        return three_pieces(tmp_path)(triton, inputs, say)

    triton, server = make_server(tmp_path, script)
    server._senders = SenderPool(server._send, num_threads=1)
    endless, other = Endless(), Sender()
    server.execute([make_request(endless)])
    wait(lambda: len(endless.sent) > 1)
    server.execute([make_request(other)])
    wait(lambda: server._admission.num_open == 0)
    server.close()
    assert other.texts == ["a", "b", "c"]
    assert len(set(endless.texts)) == 1 and endless.error is None


def test_who_is_served_when_the_model_is_unloaded_is_told_why_behind_what_there_is(tmp_path: Path) -> None:
    num_rows = 3 * MAX_PIECES
    first_left, go_on = threading.Event(), threading.Event()

    class Slow(Sender):
        def send(self, response: Any = None, flags: int = 0) -> None:
            first_left.set()
            assert go_on.wait(60)
            super().send(response, flags)

    def script(triton: Triton, inputs: dict, say: Say) -> Iterator[SimpleNamespace]:
        for _ in range(num_rows):
            say(inputs, [65], 0)
        wait(lambda: triton.cancelled)
        go_on.set()
        yield failed(triton, "cancelled", "the request was cancelled")

    _, server = make_server(tmp_path, script)
    server._senders = SenderPool(server._send, num_threads=1)
    sender = Slow()
    server.execute([make_request(sender)])
    assert first_left.wait(60)
    server.close()
    assert [flags for _, flags in sender.sent] == [0] * num_rows + [FINAL_FLAG]
    assert "shutting down" in sender.error.message()


def test_who_has_a_thread_once_the_model_is_being_unloaded_is_told_why(tmp_path: Path) -> None:
    _, server = make_server(tmp_path, three_pieces(tmp_path))
    server._closing.set()
    sender = Sender()
    server.execute([make_request(sender)])
    wait(lambda: server._admission.num_open == 0)
    server.close()
    assert server._open == {}
    assert len(sender.sent) == 1 and "shutting down" in sender.error.message()


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


def wait(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_who_waits_for_a_thread_is_looked_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline, a client that goes, and a drain, while the only thread is with another request."""
    monkeypatch.setattr("kvforge.serving.text_models.bls.MAX_THREADS", 1)
    go_on = threading.Event()

    def script(triton: Triton, inputs: dict, say: Say) -> list[SimpleNamespace]:
        go_on.wait(60)
        say(inputs, [65], SEQUENCE_END | REQUEST_END)
        return [triton.InferenceResponse([])]

    triton, server = make_server(tmp_path, script)
    first, late, left, patient, refused = (Sender() for _ in range(5))
    server.execute([make_request(first)])
    wait(lambda: triton.calls)
    server.execute([make_request(late, limit_us=1000), make_request(left), make_request(patient)])
    wait(lambda: late.sent)
    assert "deadline has passed" in late.error.message()
    left.gone = True
    wait(lambda: left.sent)
    assert left.error.code() == Triton.TritonError.CANCELLED
    wait(lambda: triton.told_open[-1:] == [2])
    (tmp_path / "drain").write_text(json.dumps({"deadline_s": 60}))
    wait(lambda: server._admission.closed)
    server.execute([make_request(refused)])
    assert "shutting down" in refused.error.message()
    go_on.set()
    wait(lambda: server._admission.num_open == 0)
    assert first.texts == patient.texts == [Tokenizer.from_dir(tmp_path).decode([65])]
    assert len(triton.calls) == 2
    server.close()


def test_a_drain_ends_who_waits_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvforge.serving.text_models.bls.MAX_THREADS", 1)
    go_on = threading.Event()

    def script(triton: Triton, inputs: dict, say: Say) -> list[SimpleNamespace]:
        go_on.wait(60)
        return [failed(triton, "unavailable", "the server is shutting down")]

    triton, server = make_server(tmp_path, script)
    senders = [Sender() for _ in range(4)]
    server.execute([make_request(sender) for sender in senders[:3]])
    wait(lambda: triton.calls)
    (tmp_path / "drain").write_text(json.dumps({"deadline_s": 0}))
    wait(lambda: senders[1].sent and senders[2].sent)
    assert all("shutting down" in sender.error.message() for sender in senders[1:3])
    go_on.set()
    wait(lambda: server._admission.num_open == 0)
    assert len(triton.calls) == 1
    server.close()


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


def test_the_wait_for_a_thread_counts_towards_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(step=2 * LIMIT_US / 1e6)
    monkeypatch.setattr(
        "kvforge.serving.text_models.bls.time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda s: None)
    )
    triton, sender = serve(tmp_path, lambda triton, inputs, say: [])
    assert triton.calls == []
    assert sender.error.message() == "the request's deadline has passed: its timeout was 60 s"


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
