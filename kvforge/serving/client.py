"""A streaming client for `ensemble` and `tensorrt_llm` over Triton's own gRPC client."""

import queue
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from kvforge.errors import KvforgeError

# KServe datatype of each input a caller may give; the shape is [1, n].
DATATYPES = {
    "text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL", "end_id": "INT32", "top_k": "INT32",
    "top_p": "FP32", "temperature": "FP32", "repetition_penalty": "FP32", "presence_penalty": "FP32",
    "frequency_penalty": "FP32", "min_tokens": "INT32", "seed": "UINT64", "return_log_probs": "BOOL",
    "exclude_input_in_output": "BOOL", "num_return_sequences": "INT32", "stop_words": "BYTES",
    "bad_words": "BYTES", "input_ids": "INT32", "input_lengths": "INT32", "request_output_len": "INT32",
    "streaming": "BOOL", "stop": "BOOL", "runtime_top_k": "INT32", "runtime_top_p": "FP32",
    "beam_width": "INT32", "return_num_input_tokens": "BOOL", "return_num_output_tokens": "BOOL",
}  # fmt: skip
_NUMPY = {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64}


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
        self._client.start_stream(lambda result, error: self._responses.put((result, error, time.monotonic())))

    def generate(
        self, model: str, inputs: Mapping[str, Any], request_id: str = "", timeout_s: float = 300.0
    ) -> Iterator[StreamResponse]:
        """Send one request and yield its responses. Raises KvforgeError with the server's message."""
        return self.send(model, [_tensor(name, value) for name, value in inputs.items()], request_id, timeout_s)

    def send(
        self, model: str, tensors: list[grpcclient.InferInput], request_id: str = "", timeout_s: float = 300.0
    ) -> Iterator[StreamResponse]:
        """`generate` for tensors made by the caller. The request leaves before the first response is asked for."""
        self._client.async_stream_infer(model, tensors, request_id=request_id, enable_empty_final_response=True)
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Iterator[StreamResponse]:
        while True:
            try:
                result, error, arrived = self._responses.get(timeout=timeout_s)
            except queue.Empty:
                raise KvforgeError(f"the server sent nothing for {timeout_s:.0f} s") from None
            if error is not None:
                raise KvforgeError(str(error))
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            tensors = {output.name: result.as_numpy(output.name) for output in response.outputs}
            if tensors:
                yield StreamResponse(tensors, final, arrived)
            if final:
                return

    def cancel(self) -> None:
        """Cancel what is running and end the stream."""
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        """End the stream; idempotent. A request still running is cancelled."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def __enter__(self) -> "StreamingClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tensor(name: str, value: Any) -> grpcclient.InferInput:
    datatype = DATATYPES[name]
    values = value if isinstance(value, (list, tuple, np.ndarray)) else [value]
    if datatype == "BYTES":
        values = [item.encode() if isinstance(item, str) else item for item in values]
    array = np.array([values], dtype=_NUMPY[datatype])
    tensor = grpcclient.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor
