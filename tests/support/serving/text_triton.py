"""A Triton and a stub that answer from a list, in front of the text server (`TextServer`)."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.contract.text_rows import REQUEST_END, SEQUENCE_END, RowMessage, read_rows
from kvforge.serving.engine.protocol import BLOB
from kvforge.serving.options import ModelOptions, write_serve_file
from kvforge.serving.text_models.bls import TextServer
from kvforge.serving.triton_config import TritonConfig
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


def wait(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
