"""The text server behind `tensorrt_llm_bls`, with a Triton and an engine that answer from a list."""

import gc
import itertools
import json
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.stub.responses import FINAL, HEARTBEAT, SEQUENCE_END
from kvforge.serving.text_models.bls import TextServer
from kvforge.serving.text_models.lanes import SHORT_BYTES
from tests.support.models.checkpoints import write_byte_tokenizer

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
    """triton_python_backend_utils; `script` makes the engine's responses from the stream key."""

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

    def InferenceResponse(self, output_tensors: list[Tensor], error: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            output_tensors=lambda: output_tensors, has_error=lambda: error is not None, error=lambda: error
        )

    def InferenceRequest(self, **fields: Any) -> SimpleNamespace:
        self.calls.append(fields)
        inputs = {tensor.name(): tensor.as_numpy() for tensor in fields["inputs"]}
        return SimpleNamespace(exec=lambda decoupled: self.script(self, inputs))

    @staticmethod
    def get_input_tensor_by_name(request: Any, name: str) -> Tensor | None:
        return Tensor(name, request.inputs[name]) if name in request.inputs else None


class Sender:
    def __init__(self) -> None:
        self.sent: list[tuple[Any, int]] = []

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        return False

    @property
    def texts(self) -> list[str]:
        return [response.output_tensors()[0].as_numpy().item().decode() for response, _ in self.sent]

    @property
    def error(self) -> Any:
        return self.sent[-1][0].error()


def answer(triton: Triton, inputs: dict, tokens: list[int], flags: int, **more: np.ndarray) -> SimpleNamespace:
    key = int(inputs["stream_key"][0, 0])
    arrays = {
        "output_ids": np.array([[tokens]], np.int32).reshape(1, 1, -1),
        "sequence_length": np.array([[len(tokens)]], np.int32),
        "stream_state": np.array([[key, 0, flags]], np.int64),
        **more,
    }
    return triton.InferenceResponse([Tensor(name, array) for name, array in arrays.items()])


def serve(folder: Path, script: Any, accumulate: bool = False, **inputs: np.ndarray) -> tuple[Triton, Sender]:
    write_byte_tokenizer(folder)
    parameters = {"accumulate_tokens": str(accumulate), "tokenizer_dir": str(folder), "max_queue_size": "2",
                  "ack_socket": str(folder / "acks.sock"), "max_request_bytes": "10000"}  # fmt: skip
    names = ("text_input", "max_tokens", "top_k", "stream", "num_draft_tokens")
    config = {
        "max_batch_size": 2,
        "model_transaction_policy": {"decoupled": True},
        "input": [{"name": name} for name in names],
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }
    triton, sender = Triton(script), Sender()
    server = TextServer(triton, {"model_config": json.dumps(config)})
    tensors = {"text_input": np.array([[b"Hi"]], object), "max_tokens": np.array([[4]], np.int32), **inputs}
    request = SimpleNamespace(
        inputs=tensors, get_response_sender=lambda: sender, parameters=lambda: "", timeout=lambda: LIMIT_US,
        request_id=lambda: "mine", requested_output_names=lambda: ["text_output", "sequence_index"],
    )  # fmt: skip
    server.execute([request])
    while server._admission.num_open:
        time.sleep(0.001)
    server._pool.shutdown(wait=True)
    server.close()
    return triton, sender


def three_pieces(tokenizer_folder: Path) -> Any:
    def script(triton: Triton, inputs: dict) -> list[SimpleNamespace]:
        tokenizer = Tokenizer.from_dir(tokenizer_folder)
        assert tokenizer is not None
        a, b, c = tokenizer.encode("abc", add_special_tokens=False)
        return [
            answer(triton, inputs, [a], 0, sequence_index=np.array([[0]], np.int32)),
            answer(triton, inputs, [], HEARTBEAT),
            answer(triton, inputs, [b, c], SEQUENCE_END | FINAL),
        ]

    return script


@pytest.mark.parametrize(("accumulate", "texts"), [(False, ["a", "bc"]), (True, ["a", "abc"])])
def test_pieces_or_the_whole_text_so_far(tmp_path: Path, accumulate: bool, texts: list[str]) -> None:
    top_k = np.array([[7]], np.int32)
    triton, sender = serve(tmp_path, three_pieces(tmp_path), accumulate, top_k=top_k)
    assert sender.texts == texts
    assert [flags for _, flags in sender.sent] == [0, FINAL_FLAG]
    assert [tensor.name() for tensor in sender.sent[0][0].output_tensors()] == ["text_output", "sequence_index"]
    (call,) = triton.calls
    inputs = {tensor.name(): tensor.as_numpy() for tensor in call["inputs"]}
    assert inputs["runtime_top_k"] is top_k
    assert inputs["request_output_len"].tolist() == [[4]]
    assert (call["request_id"], call["parameters"]["errors_as_tensors"]) == ("mine", True)
    assert 0 < call["parameters"]["timeout"] < LIMIT_US  # what is left of it


def test_an_error_behind_a_response_arrives(tmp_path: Path) -> None:
    def script(triton: Triton, inputs: dict) -> list[SimpleNamespace]:
        reason = json.dumps({"outcome": "lost", "message": "the engine died"}).encode()
        error = {"finish_reason": np.array([[b"error"]], object), "stop_reason": np.array([[reason]], object)}
        return [answer(triton, inputs, [65], 0), answer(triton, inputs, [], FINAL, **error)]

    _, sender = serve(tmp_path, script)
    assert len(sender.sent) == 2
    assert (sender.error.message(), sender.error.code()) == ("the engine died", Triton.TritonError.UNAVAILABLE)
    assert sender.sent[-1][1] == FINAL_FLAG


def test_a_refusal_keeps_its_code(tmp_path: Path) -> None:
    def script(triton: Triton, inputs: dict) -> list[SimpleNamespace]:
        return [triton.InferenceResponse([], Triton.TritonError("full", Triton.TritonError.UNAVAILABLE))]

    _, sender = serve(tmp_path, script)
    assert (sender.error.message(), sender.error.code()) == ("full", Triton.TritonError.UNAVAILABLE)


def test_an_engine_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    _, sender = serve(tmp_path, lambda triton, inputs: [])
    assert "without an answer" in sender.error.message()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [({"text_input": np.array([[b""]], object)}, "prompt is empty"),
     ({"num_draft_tokens": np.array([[3]], np.int32)}, "'num_draft_tokens' cannot be used")],
)  # fmt: skip
def test_refusals_never_reach_the_engine(tmp_path: Path, inputs: dict, words: str) -> None:
    triton, sender = serve(tmp_path, lambda triton, inputs: [], **inputs)
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


def test_the_wait_for_a_thread_counts_towards_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(step=2 * LIMIT_US / 1e6)
    monkeypatch.setattr(
        "kvforge.serving.text_models.bls.time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda s: None)
    )
    triton, sender = serve(tmp_path, lambda triton, inputs: [])
    assert triton.calls == []
    assert sender.error.message() == "the request's deadline has passed: its timeout was 60 s"


def test_a_call_is_taken_to_its_end_and_outlives_its_answer(tmp_path: Path) -> None:
    """What Triton does with a call that is dropped too early, or never taken to its end: bls.LINGER_S."""
    made: list[weakref.ref[Responses]] = []

    def script(triton: Triton, inputs: dict) -> Responses:
        failing = answer(triton, inputs, [-1], 0)  # no token id: the answer fails here
        responses = Responses([failing, answer(triton, inputs, [65], SEQUENCE_END | FINAL)])
        made.append(weakref.ref(responses))
        return responses

    _, sender = serve(tmp_path, script)
    assert "below 0" in sender.error.message()
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
    triton, sender = serve(tmp_path, lambda triton, inputs: [], text_input=np.array([[text]], object))
    assert triton.calls == []
    assert len(sender.sent) == 1
    assert sender.error.code() == Triton.TritonError.INTERNAL
    assert sender.error.message().startswith("the request failed")
    assert "path" not in sender.error.message()


def test_a_long_text_is_answered_as_a_short_one(tmp_path: Path) -> None:
    text = np.array([[b"x" * (SHORT_BYTES + 1)]], object)
    triton, sender = serve(tmp_path, three_pieces(tmp_path), text_input=text)
    assert sender.texts == ["a", "bc"]
    (call,) = triton.calls
    assert {t.name(): t.as_numpy() for t in call["inputs"]}["input_lengths"].item() == SHORT_BYTES + 1
