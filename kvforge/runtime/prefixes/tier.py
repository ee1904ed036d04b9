"""The tier below an engine's pool: a thread that writes pages, one that reads them, nothing that a step waits for."""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from kvforge.prefix_store.page_store import PageStore
from kvforge.runtime.prefixes.device_page_memory import DevicePageMemory
from kvforge.runtime.prefixes.page_memory import PageMemory
from kvforge.runtime.prefixes.rates import Rates
from kvforge.runtime.scheduling.page_pool import DEFAULT_PRIORITY
from kvforge.runtime.scheduling.prefix_cache import PrefixCache

STALL_S = 5.0
"""Once a page takes this long to read, nobody waits for pages any more until it is there."""
CLOSE_S = 1.5
"""What ``close`` gives the writer: an engine process has little longer once its server is gone."""


class PageReading:
    """Pages on their way from a store: ``num_done`` of the first are there, and after ``cancel`` none is written to."""

    def __init__(self, tier: "PrefixTier", digests: Sequence[bytes], pages: Sequence[int]) -> None:
        self._tier, self.digests, self.pages = tier, digests, pages
        self.num_done = 0
        self._lock = threading.Lock()
        self._ended = False

    @property
    def is_over(self) -> bool:
        """No more pages come, or none that is worth waiting for."""
        return self._ended or self._tier.is_stalled

    def cancel(self) -> None:
        """Read no more pages. Waits for no store."""
        with self._lock:
            self._ended = True

    def fill(self, memory: PageMemory | DevicePageMemory, content: memoryview) -> bool:
        """Fill the next page, in the reader's thread; False where it was cancelled."""
        with self._lock:
            if not self._ended:
                memory.fill(self.pages[self.num_done], content)
                self.num_done += 1
            return not self._ended


class PrefixTier:
    """A ``PageSource`` of the scheduler, and what writes the pages that ``cache`` publishes.

    A page is copied out of the pool while steps go on. It keeps its content as long as it is published: the copy is
    thrown away where the page was given up meanwhile.
    """

    def __init__(
        self, store: PageStore, memory: PageMemory | DevicePageMemory, cache: PrefixCache, num_pages: int
    ) -> None:
        self._store, self._memory, self._cache = store, memory, cache
        self.rates = Rates()
        self._writes: deque[tuple[bytes, int]] = deque(maxlen=num_pages)
        self._notes: deque[tuple[list[bytes], int | None]] = deque(maxlen=1024)
        self._has_work, self._is_idle = threading.Event(), threading.Event()
        self._has_ended = threading.Event()
        self._readings: queue.SimpleQueue[PageReading | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._closed = False
        self._content = memoryview(bytearray(memory.page_bytes))
        self.read_bytes = self.written_bytes = 0
        self.read_s = self.write_s = 0.0
        cache.on_publish = self._published
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("prefix-writer", self._write), ("prefix-reader", self._read))
        ]
        for thread in self._threads:
            thread.start()

    # -- asked by the scheduler, in the engine's thread ------------------------------------------------------

    def stored(self, digests: Iterable[bytes]) -> list[bytes]:
        """Return the first of ``digests`` up to one that is not there; nothing where computing is cheaper."""
        if self._closed:
            return []
        found = list(itertools.takewhile(self._store.__contains__, digests))
        if not found:
            self._notes.append(([], None))  # another server may have it
            self._has_work.set()
        return found if found and not self.is_stalled and self.rates.reading_is_cheaper() else []

    def read(self, digests: Sequence[bytes], pages: Sequence[int]) -> PageReading:
        """Begin to fill ``pages``, which are the caller's, until ``PageReading.cancel``."""
        reading = PageReading(self, digests, pages)
        self._readings.put(reading)
        return reading

    def used(self, digests: list[bytes], priority: int | None = None) -> None:
        """Note that pages are used, or what they are worth from now on."""
        self._notes.append((digests, priority))
        self._has_work.set()

    @property
    def is_stalled(self) -> bool:
        """The store does not answer."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > STALL_S

    # -- for the engine --------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Wait for pages, where there is nothing else to do."""
        self._has_ended.wait(seconds)
        self._has_ended.clear()

    def flush(self, seconds: float) -> bool:
        """Wait until all that was published is written; whether it is."""
        self._is_idle.clear()
        self._has_work.set()
        return self._is_idle.wait(seconds)

    def close(self) -> None:
        """Write what is left within ``CLOSE_S`` and end the threads. Idempotent."""
        if not self._closed:
            self.flush(CLOSE_S)
            self._closed = True
            self._cache.on_publish = None
            self._has_work.set()
            self._readings.put(None)

    def stats(self) -> dict[str, float]:
        """Return bytes and seconds of both threads so far, and the pages that this engine may take."""
        return {
            "prefix_read_bytes": self.read_bytes,
            "prefix_written_bytes": self.written_bytes,
            "prefix_read_s": self.read_s,
            "prefix_write_s": self.write_s,
            "num_stored_pages": len(self._store),
        }

    # -- the threads -----------------------------------------------------------------------------------------

    def _published(self, digest: bytes, page: int) -> None:
        if digest in self._store:
            self.used([digest])
        else:
            self._writes.append((digest, page))
            self._has_work.set()

    def _write(self) -> None:
        while not self._closed:
            if not self._writes and not self._notes:
                self._is_idle.set()
                self._has_work.wait()
                self._has_work.clear()
            while self._writes and not self._closed:
                self._write_page(*self._writes.popleft())
            while self._notes and not self._closed:
                digests, priority = self._notes.popleft()
                if priority is not None:
                    for digest in digests:
                        self._store.set_priority(digest, priority)
                elif digests:
                    self._store.touch(digests)
                else:
                    self._store.refresh()

    def _write_page(self, digest: bytes, page: int) -> None:
        start, epoch = time.perf_counter(), self._cache.epoch(page)
        if self._cache.page_named(digest) != page:
            return
        self._memory.copy(page, self._content)
        if self._cache.epoch(page) == epoch and self._store.write(digest, DEFAULT_PRIORITY, self._content):
            self.written_bytes += self._memory.page_bytes
            self.write_s += time.perf_counter() - start

    def _read(self) -> None:
        content = memoryview(bytearray(self._memory.page_bytes))
        while (reading := self._readings.get()) is not None:
            start = time.perf_counter()
            for digest in reading.digests:
                self._busy_since = time.monotonic()
                is_sound = not reading.is_over and self._store.read(digest, content)
                self._busy_since = None
                if not is_sound or not reading.fill(self._memory, content):
                    break
                self.read_bytes += len(content)
            reading.cancel()
            seconds = time.perf_counter() - start
            self.read_s += seconds
            if reading.num_done:
                self.rates.read(reading.num_done, seconds)
            self._has_ended.set()
