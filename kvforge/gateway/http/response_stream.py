"""Answers on their way to a client that may go away, or stop reading, at any moment."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvforge.common.native_calls import is_panic
from kvforge.gateway.answers.generation import Generation
from kvforge.gateway.answers.response_formats import ResponseFormat
from kvforge.gateway.errors import ApiError
from kvforge.gateway.http.error_faces import error_event, error_response
from kvforge.gateway.http.held_answers import HeldAnswer

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
EVENT_BYTES = 1 << 18
"""A response that gathered many tokens becomes several events of about this size."""
WRITE_BYTES = 1 << 16
DISCONNECTED = "disconnected"
STALLED = "stalled"


class StreamedResponse(Response):
    """Runs a generation and writes it, streamed or whole. The generation is cancelled when the client disconnects
    or takes longer than `write_timeout_s` to read what was sent.

    The status is sent with the first piece, so that an error before it is a proper one; an error after it is an
    event of its own. scope["log"] is told how it ended.
    """

    def __init__(self, generation: Generation, form: ResponseFormat, held: HeldAnswer, write_timeout_s: float) -> None:
        self._generation = generation
        self._form = form
        self._held = held
        self._write_timeout_s = write_timeout_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        log = scope.setdefault("log", {})
        writer = _Writer(scope, send, self._write_timeout_s)
        respond = self._respond(writer)
        work = asyncio.ensure_future(respond)
        gone = asyncio.ensure_future(_disconnect(receive))
        writer.on_stall = work.cancel
        ends = scope.get("ends", set())
        ended: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()

        def end(error: ApiError) -> None:
            if not ended.done():
                ended.set_result(error)

        ends.add(end)
        try:
            await asyncio.wait((work, gone, ended), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and ended.done() and not gone.done():
                log["error"] = ended.result().logged
                await _cancel(work)
                await writer.fail(ended.result())
                return
            if not work.done():
                log["error"] = DISCONNECTED
                return
            if work.cancelled():
                log["error"] = STALLED
                abort: Callable[[], None] | None = scope.get("state", {}).get("abort")
                if abort is not None:
                    abort()
                return
            error = work.result()
            if error is not None:
                log["error"] = error.logged
        finally:
            ends.discard(end)
            await _cancel(work, gone)
            self._held.release()
            usage = self._generation.usage
            log.update(prompt_tokens=usage.prompt, completion_tokens=usage.completion)

    async def _respond(self, writer: "_Writer") -> ApiError | None:
        try:
            await (self._stream(writer) if self._generation.asked.stream else self._whole(writer))
        except ApiError as error:
            await writer.fail(error)
            return error
        except BaseException as error:
            if not is_panic(error):
                raise
            failure = ApiError(500, "the tokenizer fails on the generated tokens")
            await writer.fail(failure)
            return failure
        return None

    async def _whole(self, writer: "_Writer") -> None:
        async with contextlib.aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                self._form.add(delta)
                self._held.set(self._form.num_bytes)
        self._check_finished()
        await writer.whole(list(self._form.whole(self._generation.usage.body)), self._generation.headers)

    async def _stream(self, writer: "_Writer") -> None:
        async with contextlib.aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if not writer.started:
                    await writer.start([*_SSE_HEADERS, *self._generation.headers])
                    for event in self._form.opening():
                        await writer.write(event)
                self._form.add(delta)
                if not delta.more or self._form.num_bytes > EVENT_BYTES:
                    await writer.write(self._form.event(delta.index))
        self._check_finished()
        await writer.write(self._form.closing(self._generation.usage.body), end=True)

    def _check_finished(self) -> None:
        if self._form.missing():
            raise ApiError(503, "the inference server ended the answer before its end; try again")


class _Writer:
    """`send` with a limit on how long a client may leave it waiting."""

    def __init__(self, scope: Scope, send: Send, timeout_s: float) -> None:
        self._scope = scope
        self._send = send
        self._timeout_s = timeout_s
        self.on_stall: Callable[[], object] = lambda: None
        self.started = False

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._timed({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes, end: bool = False) -> None:
        if data or end:
            await self._timed({"type": "http.response.body", "body": data, "more_body": not end})

    async def whole(self, parts: Sequence[bytes | bytearray], headers: Sequence[tuple[bytes, bytes]]) -> None:
        """A body of JSON, a bounded part at a time; `headers` beside its own."""
        size = sum(map(len, parts))
        own = [(b"content-length", str(size).encode()), (b"content-type", b"application/json")]
        await self.start([*own, *headers])
        small = bytearray()
        for part in parts:
            for at in range(0, len(part), WRITE_BYTES):
                small += part[at : at + WRITE_BYTES]
                if len(small) >= WRITE_BYTES:
                    await self.write(bytes(small))
                    small.clear()
                    await asyncio.sleep(0)
        await self.write(bytes(small), end=True)

    async def respond(self, response: Response) -> None:
        self.started = True
        await self._timed(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await self.write(bytes(response.body), end=True)

    async def fail(self, error: ApiError) -> None:
        """End with an error: a response of its own before the first byte, later an event."""
        if self.started:
            await self.write(error_event(error, self._scope), end=True)
        else:
            await self.respond(error_response(error, self._scope))

    async def _timed(self, message: Message) -> None:
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self.on_stall)
        try:
            await self._send(message)
        finally:
            timer.cancel()


async def _cancel(*tasks: asyncio.Future) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
