"""A streaming client for `ensemble` and `tensorrt_llm` over Triton's own gRPC client."""

import contextlib
import queue
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from kvforge.common.errors import KvforgeError
from kvforge.serving.server.repository import repository_templates

_NUMPY = {
    "BYTES": np.object_, "INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64, "FP32": np.float32,
    "FP16": np.float16, "UINT8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_INPUT = re.compile(r'name: "(\w+)" data_type: TYPE_(\w+)')
STOP_TIMEOUT_S = 2.0
"""What a stopped request has to end by itself."""
_STOP = {"stop": True, "input_ids": [0], "input_lengths": 1, "request_output_len": 1}


@cache
def input_datatypes() -> dict[str, str]:
    """KServe datatype of every input of every model, from the repository's config.pbtxt files."""
    datatypes = {}
    for config in repository_templates().glob("*/config.pbtxt"):
        inputs = config.read_text().partition("\noutput [")[0]
        datatypes.update({name: kind.replace("STRING", "BYTES") for name, kind in _INPUT.findall(inputs)})
    return datatypes


@dataclass(frozen=True)
class StreamResponse:
    """One streamed response: its output tensors by name, and when it arrived (time.monotonic)."""

    tensors: dict[str, np.ndarray]
    final: bool
    arrived: float

    @property
    def text(self) -> str:
        """The new piece of text (`ensemble`)."""
        return self.tensors["text_output"].reshape(-1).tolist()[0].decode()

    @property
    def token_ids(self) -> list[int]:
        """The new tokens (`tensorrt_llm`)."""
        return self.tensors["output_ids"].reshape(-1).tolist()


class StreamingClient:
    """One gRPC stream, one request at a time. Use as a context manager, or close."""

    def __init__(self, grpc_url: str) -> None:
        self._client = grpcclient.InferenceServerClient(grpc_url)
        self._responses: queue.SimpleQueue[tuple[Any, Any, float]] = queue.SimpleQueue()
        self._running: str | None = None
        self._client.start_stream(lambda result, error: self._responses.put((result, error, time.monotonic())))

    def generate(
        self, model: str, inputs: Mapping[str, Any], request_id: str | None = None, timeout_s: float = 300.0
    ) -> Iterator[StreamResponse]:
        """Send one request and yield its responses. Without an id it has one of its own, by which `close` ends it.
        Raises KvforgeError with the server's message."""
        return self.send(model, [_tensor(name, value) for name, value in inputs.items()], request_id, timeout_s)

    def send(
        self, model: str, tensors: list[grpcclient.InferInput], request_id: str | None = None, timeout_s: float = 300.0
    ) -> Iterator[StreamResponse]:
        """`generate` for tensors made by the caller. The request leaves before the first response is asked for."""
        self._running = secrets.token_hex(8) if request_id is None else request_id
        self._client.async_stream_infer(model, tensors, request_id=self._running, enable_empty_final_response=True)
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Iterator[StreamResponse]:
        while True:
            try:
                result, error, arrived = self._responses.get(timeout=timeout_s)
            except queue.Empty:
                raise KvforgeError(f"the server sent nothing for {timeout_s:.0f} s") from None
            if error is not None:
                self._running = None
                raise KvforgeError(str(error))
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            tensors = {output.name: result.as_numpy(output.name) for output in response.outputs}
            if final:
                self._running = None
            if tensors:
                yield StreamResponse(tensors, final, arrived)
            if final:
                return

    def cancel(self) -> None:
        """Cancel what is running and end the stream. tritonserver 2.51 can lock itself up where it is just writing a
        response (docs/load-testing.md)."""
        self._running = None
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        """End the stream; idempotent. A request still running is stopped, and cancelled where that does not help."""
        if self._running:
            self._stop(self._running)
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def _stop(self, request_id: str) -> None:
        """End a request with the tokens it has, and read to its end."""
        until = time.monotonic() + STOP_TIMEOUT_S
        with contextlib.suppress(InferenceServerException, KvforgeError):
            tensors = [_tensor(name, value) for name, value in _STOP.items()]
            self._client.async_stream_infer("tensorrt_llm", tensors, request_id=request_id)
            for _ in self._receive(STOP_TIMEOUT_S):
                if time.monotonic() > until:
                    break
        self._running = None

    def __enter__(self) -> "StreamingClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tensor(name: str, value: Any) -> grpcclient.InferInput:
    """`value` as a request input with a batch dimension of 1 before it: a number, a text, or a list of them."""
    datatype = input_datatypes()[name]
    values = value if isinstance(value, (list, tuple, np.ndarray)) else [value]
    if datatype == "BYTES":
        values = [item.encode() if isinstance(item, str) else item for item in values]
    array = np.array([values], dtype=_NUMPY[datatype])
    tensor = grpcclient.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor
