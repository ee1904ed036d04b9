"""A gRPC server that speaks as Triton's `tensorrt_llm` does and generates what a test says."""

import asyncio
import json
import struct
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvforge.serving.contract.failures import Failure
from kvforge.serving.contract.response_fields import STOP_REASON
from kvforge.serving.stub.responses import failure_arrays

DTYPES = {"INT32": "<i4", "FP32": "<f4", "BOOL": "?", "UINT64": "<u8"}


@dataclass
class Row:
    """One response: tokens of a sequence and, with the last, why it ended."""

    tokens: list[int]
    sequence: int = 0
    log_probs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: Any = None
    reused_blocks: int | None = None


Script = Callable[["Request"], AsyncIterator[Row | Failure]]


@dataclass
class Request:
    """What arrived: values by tensor name, without the batch dimension."""

    id: str
    tensors: dict[str, np.ndarray]
    outputs: list[str]
    parameters: dict[str, Any]
    cancelled: bool = False
    """It was ended by its client, with a `stop` or with its stream."""
    prompts_sent: set[int] = field(default_factory=set)
    """Sequences whose response has had what is said of the prompt."""
    broken: bool = False
    """Its stream was cancelled."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def value(self, name: str) -> Any:
        return self.tensors[name].reshape(-1)[0].item()

    def texts(self, name: str) -> list[str]:
        return [text.decode() for text in self.tensors[name].reshape(-1)]

    @property
    def prompt(self) -> list[int]:
        return self.tensors["input_ids"][0].tolist()


async def bytes_of(text: str, request: Request, finish: str = "length", stop_reason: Any = None) -> AsyncIterator[Row]:
    """A response per byte of a text, in the tests' byte tokenizer, of every sequence; the last with its end."""
    num = request.value("num_return_sequences") if "num_return_sequences" in request.tensors else 1
    tokens = [byte + 3 for byte in text.encode()]
    k = request.value("num_top_log_probs") if "num_top_log_probs" in request.tensors else 0
    for sequence in range(num):
        for position, token in enumerate(tokens):
            last = position == len(tokens) - 1
            top = {token + other: -0.5 - other for other in range(k)}
            yield Row([token], sequence, [-0.5], [top], finish if last else "", stop_reason if last else None, 1)


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`script` answers every request; `requests` are those that came."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.requests: list[Request] = []
        self.ready = True
        self.heeds_stop = True
        self.script: Script = lambda request: bytes_of("hello", request)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=self.ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=self.ready)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        # Triton 2.51 can crash at the end of a stream that asked for status codes.
        assert "triton_grpc_error" not in dict(context.invocation_metadata())
        async for message in requests:
            request = _read(message)
            if "stop" in request.tensors:
                for other in self.requests:
                    if other.id == request.id and self.heeds_stop:
                        other.stopped.set()
                return
            self.requests.append(request)
            collected: dict[int, Row] = {}
            try:
                async for row in _until_stopped(self.script(request), request):
                    if isinstance(row, Failure):
                        yield _error(request, row)
                        return
                    elif request.value("streaming"):
                        yield _response(request, row)
                    else:
                        _collect(collected, row)
            except (asyncio.CancelledError, GeneratorExit):  # GeneratorExit: cancelled while a response was written
                request.cancelled = request.broken = True
                raise
            for row in collected.values():
                yield _response(request, row)


async def _until_stopped(rows: AsyncIterator[Row | Failure], request: Request) -> AsyncIterator[Row | Failure]:
    """What a script gives before a `stop`, whatever it waits for then."""
    stopped = asyncio.ensure_future(request.stopped.wait())
    try:
        while True:
            row = asyncio.ensure_future(anext(rows))
            await asyncio.wait((row, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                request.cancelled = True
                row.cancel()
                return
            yield row.result()
    except StopAsyncIteration:
        return
    finally:
        stopped.cancel()


def _collect(rows: dict[int, Row], row: Row) -> None:
    known = rows.setdefault(row.sequence, Row([], row.sequence))
    known.tokens += row.tokens
    known.log_probs += row.log_probs
    known.top += row.top
    known.finish_reason, known.stop_reason, known.reused_blocks = row.finish_reason, row.stop_reason, row.reused_blocks


def _read(message: Any) -> Request:
    tensors = {}
    for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            values, at = [], 0
            while at < len(raw):
                (size,) = struct.unpack_from("<I", raw, at)
                values.append(raw[at + 4 : at + 4 + size])
                at += 4 + size
            tensors[tensor.name] = np.array(values, dtype=object).reshape(tensor.shape)
        else:
            tensors[tensor.name] = np.frombuffer(raw, DTYPES[tensor.datatype]).reshape(tensor.shape)
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in message.parameters.items()
    }
    return Request(message.id, tensors, [output.name for output in message.outputs], parameters)


def _of_prompt(request: Request) -> dict[str, bytes]:
    """Token t of the prompt has the number -t / 8 and the rank t, and those after it are the most probable ones."""
    if "num_prompt_log_probs" not in request.tensors:
        return {}
    tokens, k = np.array(request.prompt[1:], "<i4"), request.value("num_prompt_log_probs")
    top = tokens[:, None] + np.arange(1, k + 1, dtype="<i4")
    return {
        "prompt_log_probs": (-tokens / 8).astype("<f4").tobytes(),
        "prompt_log_probs_ranks": tokens.tobytes(),
        "prompt_top_log_probs_ids": top.astype("<i4").tobytes(),
        "prompt_top_log_probs": (-top / 16).astype("<f4").tobytes(),
    }


def _response(request: Request, row: Row) -> Any:
    reason = row.stop_reason
    values = {
        "output_ids": np.array(row.tokens, "<i4").tobytes(),
        "finish_reason": _text(row.finish_reason),
        "stop_reason": _text("" if reason is None else json.dumps(reason)),
        "sequence_index": np.array([row.sequence], "<i4").tobytes(),
        "output_log_probs": np.array(row.log_probs, "<f4").tobytes(),
        "top_log_probs_ids": np.array([list(top) for top in row.top], "<i4").tobytes(),
        "top_log_probs": np.array([list(top.values()) for top in row.top], "<f4").tobytes(),
        "kv_cache_reused_blocks": np.array([row.reused_blocks or 0], "<i4").tobytes(),
        **_of_prompt(request),
    }
    response = service_pb2.ModelInferResponse(model_name="tensorrt_llm", id=request.id)
    first = row.sequence not in request.prompts_sent
    request.prompts_sent.add(row.sequence)
    for name in request.outputs:
        if name.startswith("prompt_") and not first:
            continue
        response.outputs.add(name=name)
        response.raw_output_contents.append(values[name])
    return service_pb2.ModelStreamInferResponse(infer_response=response)


def _error(request: Request, error: Failure) -> Any:
    """The stub's error, or Triton's own in words only: outcome "triton"."""
    if error.outcome == "triton":
        return service_pb2.ModelStreamInferResponse(error_message=error.message)
    assert request.parameters["errors_as_tensors"]
    (said,) = failure_arrays({STOP_REASON}, error)[STOP_REASON].ravel()
    reason = json.loads(said)
    return _response(request, Row([], finish_reason="error", stop_reason=reason))


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


@contextmanager
def run_fake_triton() -> Iterator[tuple[FakeTriton, str]]:
    """The fake and its HOST:PORT, served by a thread of its own."""
    fake = FakeTriton()
    loop = asyncio.new_event_loop()
    address: list[str] = []
    started, stopping = threading.Event(), asyncio.Event()

    async def serve() -> None:
        server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
        address.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        started.set()
        await stopping.wait()
        await server.stop(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield fake, address[0]
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(60)
        if thread.is_alive():
            warnings.warn("the fake Triton goes on", stacklevel=1)
