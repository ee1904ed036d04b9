"""Streams through every door of a server, which note when each piece came."""

import contextlib
import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from urllib.parse import urlsplit

from kvforge.serving.client import StreamingClient
from tests.support.serving.gateway_process import MODEL
from tests.support.serving.server import ENDLESS, ask

DOORS = ("tensorrt_llm", "ensemble", "gateway")


class Neighbour:
    """One client that streams one request after the other. `pieces` are the monotonic times of what it got."""

    def __init__(self, door: str, stream: Callable[[], Iterator[object]]) -> None:
        self.door = door
        self.pieces: list[float] = []
        self.errors: list[str] = []
        self._stream = stream
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"neighbour-{door}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()

    def join(self) -> None:
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with contextlib.closing(self._stream()) as pieces:  # type: ignore[type-var]
                    for _ in pieces:
                        self.pieces.append(time.monotonic())
                        if self._closing.is_set():
                            return
            except Exception as error:
                if not self._closing.is_set():
                    self.errors.append(f"{type(error).__name__}: {error}")
                    time.sleep(0.05)

    def num_between(self, start: float, end: float) -> int:
        """Pieces that came in this time."""
        return sum(start < at <= end for at in list(self.pieces))

    def longest_gap(self, start: float, end: float) -> float:
        """Seconds of the longest wait that lies in this time, or reaches into it."""
        times = list(self.pieces)
        before = max((at for at in times if at <= start), default=start)
        inside = [before, *(at for at in times if start < at <= end), end]
        return max(later - earlier for earlier, later in itertools.pairwise(inside))


class Neighbours:
    """One neighbour at each door; entered once each has got something."""

    def __init__(self, grpc_url: str, gateway_url: str) -> None:
        self.all = [
            Neighbour("tensorrt_llm", lambda: _triton(grpc_url, "tensorrt_llm", [5, 9, 17])),
            Neighbour("ensemble", lambda: _triton(grpc_url, "ensemble", "Once upon a time")),
            Neighbour("gateway", lambda: _sse(gateway_url)),
        ]

    @property
    def errors(self) -> list[str]:
        return [f"{one.door}: {error}" for one in self.all for error in one.errors]

    def longest_gap(self, start: float, end: float) -> tuple[float, str]:
        """Seconds, and at which door."""
        return max((one.longest_gap(start, end), one.door) for one in self.all)

    def fewest(self, start: float, end: float) -> int:
        """Pieces that the neighbour with the fewest got."""
        return min(one.num_between(start, end) for one in self.all)

    def wait_for(self, pieces: int, timeout_s: float) -> bool:
        """Each gets so many pieces more. False when one does not within the time."""
        start, until = time.monotonic(), time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self.fewest(start, time.monotonic()) >= pieces:
                return True
            time.sleep(0.01)
        return False

    def __enter__(self) -> "Neighbours":
        assert self.wait_for(1, 120.0), f"neighbours got nothing: {self.errors}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self.all:
            one.close()
        for one in self.all:
            one.join()


def _triton(grpc_url: str, model: str, prompt: list[int] | str) -> Iterator[object]:
    with StreamingClient(grpc_url) as client:
        yield from client.generate(model, ask(model, prompt, ENDLESS))


def _sse(gateway_url: str) -> Iterator[object]:
    parts = urlsplit(gateway_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    body = {"model": MODEL, "prompt": "Once", "max_tokens": ENDLESS, "temperature": 0, "ignore_eos": True,
            "stream": True}  # fmt: skip
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read(300).decode())
        while line := response.readline():
            if line.startswith(b"data:"):
                yield line
    finally:
        connection.close()
