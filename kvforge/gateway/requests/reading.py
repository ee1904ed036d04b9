"""Where a request's body is read: on the event loop, in a thread, or in a worker process that it may end."""

import asyncio
import logging
import sys

from kvforge.common.records import to_text
from kvforge.gateway.endpoints import RENDERING, Endpoint
from kvforge.gateway.errors import ApiError
from kvforge.gateway.model import ServedModel
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.parsed_request import ParsedRequest, unpack
from kvforge.gateway.requests.request_reader import RequestReader
from kvforge.workers import WARM_WITHIN_S, WorkerDied, WorkerPool, WorkersUnavailable, WorkerTimeout

logger = logging.getLogger("kvforge.gateway")

AT_ONCE = 4096
"""Bytes of a body that is read on the event loop, which takes a few milliseconds at most."""
IN_THREAD = 1 << 16
"""Bytes of a body that is read in a thread: its JSON holds the interpreter's lock for a few milliseconds at most, and
tokenizing does not."""
NUM_WORKERS, NUM_LARGE = 3, 2
"""Worker processes, and how many of them may be busy with bodies above IN_THREAD."""
MEMORY_LEAST, MEMORY_PER_BYTE = 512 << 20, 64
"""What a worker may take for a body, and for each byte of the largest."""
WALL_FACTOR = 10
"""Wall time that a body may take, in processor time: a busy machine is no fault of the request."""


class BodyReading:
    """Reads bodies. Create it inside the event loop, and `prepare` it. Chats are always read by a worker: what a
    template does with a conversation, nobody can say before."""

    def __init__(self, model: ServedModel, options: GatewayOptions) -> None:
        self._reader = RequestReader(model, options)
        self._template = model.chat_template is not None
        self._cpu_s = options.read_timeout
        worker = "kvforge.gateway.requests.request_worker"
        command = [sys.executable, "-m", worker, model.digest, to_text(options)]
        memory = MEMORY_LEAST + MEMORY_PER_BYTE * options.max_body_bytes
        self._pool = WorkerPool(command, NUM_WORKERS, memory, max_waiting=options.max_requests)
        self._large = asyncio.Semaphore(NUM_LARGE)

    async def prepare(self) -> None:
        """Where chats are served, start all workers and wait until they are ready, so that no chat does; for at most
        WARM_WITHIN_S. Those that fail to start are tried again by requests."""
        if not self._template:
            return
        try:
            started = self._pool.warm()
        except WorkersUnavailable as error:
            logger.warning("no worker can be started yet: %s", error)
            return
        ready, _ = await asyncio.wait(map(asyncio.wrap_future, started), timeout=WARM_WITHIN_S)
        if (num_ready := sum(future.result() for future in ready)) < NUM_WORKERS:
            logger.warning("%d of %d workers have not started yet", NUM_WORKERS - num_ready, NUM_WORKERS)

    async def read(self, data: bytes, endpoint: Endpoint) -> ParsedRequest:
        """What a body asks for. Raises ApiError: 400 for a request that cannot be served as asked, or takes too much
        time or memory to read, 503 where no worker can be had."""
        if len(data) > IN_THREAD:
            async with self._large:
                return await self._in_worker(data, endpoint)
        if endpoint in RENDERING and self._template:
            return await self._in_worker(data, endpoint)
        if len(data) > AT_ONCE:
            return await asyncio.to_thread(self._reader.read, data, endpoint)
        return self._reader.read(data, endpoint)

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.close)

    async def _in_worker(self, data: bytes, endpoint: Endpoint) -> ParsedRequest:
        job = b"%d" % endpoint + data
        try:
            future = self._pool.submit(job, self._cpu_s * WALL_FACTOR, self._cpu_s)
            return unpack(await asyncio.wrap_future(future))
        except WorkerTimeout:
            raise ApiError(
                400,
                f"the request takes more than {self._cpu_s:g} s to read; shorten it",
                code="request_too_costly",
            ) from None
        except WorkerDied as error:
            logger.warning("a request could not be read: %s", error)
            if error.raised == "MemoryError":
                message = "the request takes too much memory to read; shorten it"
                raise ApiError(400, message, code="request_too_costly") from None
            raise ApiError(500, "the gateway failed to read this request; its log says why") from None
        except WorkersUnavailable as error:
            logger.warning("a request could not be read: %s", error)
            message = "the request cannot be read at the moment; send it again later"
            raise ApiError(503, message, code="gateway_busy", detail=str(error)) from None
