"""Calls to Triton: one gRPC stream per prompt, ended by closing its iterator.

A stream that a response is just written to is not cancelled: tritonserver 2.51 can lock itself up then
(docs/load-testing.md). A request whose client has gone is stopped, and its stream read to its end.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvforge.gateway.engine.engine_errors import from_failure, from_rpc_error, from_triton_error
from kvforge.gateway.engine.tensors import MODEL, ResponseTokens, read_response, stop_request
from kvforge.gateway.errors import ApiError
from kvforge.serving.contract.failures import Failure
from kvforge.serving.contract.response_fields import ERROR

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
READY_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 5.0
"""What a stopped request has to end by itself."""


class Triton:
    """The connection to one server; reconnects by itself. Create it inside the event loop."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._stopping: set[asyncio.Task[None]] = set()

    async def generate(
        self, request: service_pb2.ModelInferRequest, names: Mapping[str, str] | None = None
    ) -> AsyncGenerator[ResponseTokens, None]:
        """Send a request and yield its pieces as they are read; a slow reader slows the stream, not the memory.

        `names` are those of the request's fields in an error. Raises ApiError. Closing the iterator early stops the
        request.
        """
        call = self._stub.ModelStreamInfer()
        reading: asyncio.Future | None = None
        try:
            await call.write(request)
            await call.done_writing()
            while True:
                reading = asyncio.ensure_future(call.read())
                response = await asyncio.shield(reading)  # a read that is cancelled cancels its call
                if response is grpc.aio.EOF:
                    break
                if response.error_message:
                    raise from_triton_error(response.error_message)
                piece = read_response(response.infer_response)
                if piece is not None and piece.finish_reason == ERROR:
                    raise from_failure(Failure.from_json(piece.stop_reason), names or {})
                if piece is not None:
                    yield piece
            if await call.code() is not grpc.StatusCode.OK:
                raise from_rpc_error(await call.code(), await call.details())
        except ApiError:
            call.cancel()
            raise
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error.code(), error.details() or "") from None
        finally:
            if reading is None:
                call.cancel()
            elif not call.done():
                task = asyncio.ensure_future(self._stop(request.id, call, reading))
                self._stopping.add(task)
                task.add_done_callback(self._stopping.discard)

    async def _stop(self, request_id: str, call: grpc.aio.StreamStreamCall, reading: asyncio.Future) -> None:
        """End a request that nobody reads any more."""

        async def read_to_the_end() -> None:
            async for _ in self._stub.ModelStreamInfer(iter([stop_request(request_id)])):
                pass
            response = await reading
            while response is not grpc.aio.EOF:
                response = await call.read()

        try:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.TimeoutError):
                await asyncio.wait_for(read_to_the_end(), STOP_TIMEOUT_S)
        finally:
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def is_ready(self) -> bool:
        """Whether the server says that it and the engine's model are loaded."""
        try:
            live = await self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=READY_TIMEOUT_S)
            if not live.ready:
                return False
            model = await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=MODEL), timeout=READY_TIMEOUT_S)
            return bool(model.ready)
        except grpc.aio.AioRpcError:
            return False

    async def close(self) -> None:
        for task in self._stopping:
            task.cancel()
        await asyncio.gather(*self._stopping, return_exceptions=True)
        await self._channel.close()


async def first_piece(triton: Triton, request: service_pb2.ModelInferRequest) -> bool:
    """Whether the engine answers a request, or is alive enough to say that it is busy."""
    try:
        async for _ in triton.generate(request):
            return True
    except ApiError as error:
        return error.status == 429
    return False
