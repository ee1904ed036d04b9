"""A light gRPC client for load: one thread, one event loop, a stream per request.

Errors come as texts. The metadata `triton_grpc_error`, which makes them gRPC codes, is not sent: Triton 2.51 crashes
after a few streams that ended so (signal 11, "HandleCancellation called even when the context was not cancelled").
"""

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvforge.common.errors import KvforgeError

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
DATATYPES = {
    "text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL", "end_id": "INT32", "top_k": "INT32",
    "top_p": "FP32", "temperature": "FP32", "seed": "UINT64", "return_num_output_tokens": "BOOL",
    "input_ids": "INT32", "input_lengths": "INT32", "request_output_len": "INT32", "streaming": "BOOL",
    "runtime_top_k": "INT32", "runtime_top_p": "FP32", "num_return_sequences": "INT32", "lora_task_id": "UINT64",
    "guided_decoding_guide_type": "BYTES", "guided_decoding_guide": "BYTES",
}  # fmt: skip
"""KServe datatype of each input that a load sends."""
ERROR = "ERROR"
"""The code of an answer that is the server's refusal or failure, in words; other codes are gRPC's own."""
_NUMPY = {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64}


@dataclass
class Answer:
    """What became of one request; times are time.monotonic() seconds. ``pieces`` are the first output's values."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    pieces: list[Any] = field(default_factory=list)
    code: str = "OK"
    message: str = ""
    ended: float = 0.0

    @property
    def text(self) -> str:
        """The whole text (`ensemble`, `tensorrt_llm_bls`)."""
        return b"".join(self.pieces).decode()

    @property
    def token_ids(self) -> list[int]:
        """All tokens (`tensorrt_llm`)."""
        return [token for piece in self.pieces for token in piece]


def infer_request(
    model: str, inputs: Mapping[str, Any], output: str, request_id: str = "", stream_interval: int | None = None
) -> Any:
    """A ModelInferRequest of [1, n] tensors that asks for the one ``output``."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True  # responses say which is the last
    if stream_interval is not None:
        request.parameters["stream_interval"].int64_param = stream_interval
    for name, value in inputs.items():
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        datatype = DATATYPES[name]
        request.inputs.add(name=name, datatype=datatype, shape=[1, len(values)])
        if datatype == "BYTES":
            texts = [item.encode() if isinstance(item, str) else item for item in values]
            raw = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        else:
            raw = np.array(values, dtype=_NUMPY[datatype]).tobytes()
        request.raw_input_contents.append(raw)
    request.outputs.add(name=output)
    return request


class LoadClient:
    """``num_connections`` TCP connections to one server; use it inside a running event loop, and close it."""

    def __init__(self, grpc_url: str, num_connections: int = 1) -> None:
        options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(grpc_url, options) for _ in range(num_connections)]
        self._stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        self._next = 0

    async def ask(self, request: Any, cancel_after: int | None = None, timeout_s: float | None = None) -> Answer:
        """Send one streamed request and collect its answer; never raises for what the server says.

        ``cancel_after`` responses the call is cancelled, and the answer's code is CANCELLED. Until the last response
        the client's half of the stream stays open, as that of Triton's own client.
        """
        self._next = (self._next + 1) % len(self._stubs)
        answer, done = Answer(time.monotonic()), asyncio.Event()

        async def requests() -> AsyncIterator[Any]:
            yield request
            await done.wait()

        call = self._stubs[self._next].ModelStreamInfer(requests(), timeout=timeout_s)
        try:
            async for message in call:
                response = message.infer_response
                if message.error_message:
                    answer.code, answer.message = ERROR, message.error_message
                    done.set()
                elif response.outputs:
                    answer.arrivals.append(time.monotonic())
                    answer.pieces.append(_value(response))
                if response.parameters["triton_final_response"].bool_param:
                    done.set()
                elif cancel_after is not None and len(answer.arrivals) >= cancel_after:
                    call.cancel()
                    answer.code = "CANCELLED"
                    break
        except grpc.aio.AioRpcError as error:
            answer.code, answer.message = error.code().name, error.details() or ""
        finally:
            done.set()
        answer.ended = time.monotonic()
        return answer

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


async def ask_all(grpc_url: str, requests: Iterable[Any], concurrency: int) -> tuple[list[Answer], float]:
    """Send all requests over one connection, ``concurrency`` at a time; returns the answers and the seconds it took.

    Raises:
        KvforgeError: a request failed.
    """
    client, waiting, answers = LoadClient(grpc_url), iter(requests), list[Answer]()

    async def worker() -> None:
        for request in waiting:
            answers.append(await client.ask(request))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    seconds = time.perf_counter() - started
    await client.close()
    failed = [answer for answer in answers if answer.code != "OK"]
    if failed:
        raise KvforgeError(f"{len(failed)} of {len(answers)} requests failed, the first one: {failed[0].message}")
    return answers, seconds


def _value(response: Any) -> Any:
    """The first output: bytes of a text, or a list of numbers."""
    raw = response.raw_output_contents[0]
    if response.outputs[0].datatype == "BYTES":
        return raw[4 : 4 + struct.unpack("<I", raw[:4])[0]]
    return np.frombuffer(raw, dtype=_NUMPY[response.outputs[0].datatype]).tolist()


FORCED = {"end_id": -1, "return_num_output_tokens": True}
"""Inputs with which an answer has all its tokens, and says how many."""


def ask_text(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Inputs of a streamed request to `ensemble` or `tensorrt_llm_bls`."""
    return {"text_input": prompt, "max_tokens": max_tokens, "stream": True, **more}


def ask_tokens(prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """Inputs of a streamed request to `tensorrt_llm`."""
    ids = list(prompt)
    return {
        "input_ids": ids, "input_lengths": len(ids), "request_output_len": max_tokens, "streaming": True, **more
    }  # fmt: skip
