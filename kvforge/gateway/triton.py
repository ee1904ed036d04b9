"""Calls to Triton: one gRPC stream per prompt, cancelled by closing its iterator."""

from collections.abc import AsyncGenerator, Mapping

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvforge.gateway.engine_errors import from_outcome, from_rpc_error, from_triton_error
from kvforge.gateway.errors import ApiError
from kvforge.gateway.tensors import MODEL, ResponseTokens, read_response
from kvforge.serving.contract.response_fields import ERROR

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
READY_TIMEOUT_S = 2.0


class Triton:
    """The connection to one server; reconnects by itself. Create it inside the event loop."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def generate(
        self, request: service_pb2.ModelInferRequest, names: Mapping[str, str] | None = None
    ) -> AsyncGenerator[ResponseTokens, None]:
        """Send a request and yield its pieces as they are read; a slow reader slows the stream, not the memory.

        `names` are those of the request's fields in an error. Raises ApiError. Closing the iterator early cancels the
        request.
        """
        call = self._stub.ModelStreamInfer()
        try:
            await call.write(request)
            await call.done_writing()
            while (response := await call.read()) is not grpc.aio.EOF:
                if response.error_message:
                    raise from_triton_error(response.error_message)
                piece = read_response(response.infer_response)
                if piece is not None and piece.finish_reason == ERROR:
                    raise from_outcome(piece.stop_reason["outcome"], piece.stop_reason["message"], names or {})
                if piece is not None:
                    yield piece
            if await call.code() is not grpc.StatusCode.OK:
                raise from_rpc_error(await call.code(), await call.details())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error.code(), error.details() or "") from None
        finally:
            call.cancel()

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
        await self._channel.close()


async def first_piece(triton: Triton, request: service_pb2.ModelInferRequest) -> bool:
    """Whether the engine answers a request, or is alive enough to say that it is busy."""
    try:
        async for _ in triton.generate(request):
            return True
    except ApiError as error:
        return error.status == 429
    return False
