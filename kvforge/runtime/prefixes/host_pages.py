"""Pages in main memory, below a pool that lies on a GPU."""

import threading
from collections import OrderedDict
from collections.abc import Iterable

from kvforge.runtime.sessions.huge_pages import huge_page_memory


class HostPages:
    """A ``PageStore`` of at most ``limit_bytes``, taken when they are first used. Where it is full, a page of the
    lowest priority goes, and of these the one used longest ago; a new page that is worth less than all is not kept.

    Raises:
        MemoryError: the machine has not so much.
    """

    def __init__(self, page_bytes: int, limit_bytes: int) -> None:
        num_pages = limit_bytes // page_bytes
        self._page_bytes = page_bytes
        self._memory = memoryview(huge_page_memory(num_pages * page_bytes).numpy())
        self._free = list(range(num_pages - 1, -1, -1))
        self._places: dict[bytes, tuple[int, int]] = {}
        """Of each page its priority and its place in memory."""
        self._by_use: dict[int, OrderedDict[bytes, None]] = {}
        """Of each priority its pages, the one used longest ago first."""
        self._lock = threading.Lock()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places

    def __len__(self) -> int:
        return len(self._places)

    def write(self, digest: bytes, priority: int, content: memoryview) -> bool:
        with self._lock:
            if digest in self._places:
                return True
            if not self._free and not self._give_up(priority):
                return False
            place = self._free.pop()
            self._at(place)[:] = content
            self._add(digest, priority, place)
            return True

    def read(self, digest: bytes, content: memoryview) -> bool:
        with self._lock:
            if digest not in self._places:
                return False
            priority, place = self._places[digest]
            content[:] = self._at(place)
            self._by_use[priority].move_to_end(digest)
            return True

    def touch(self, digests: Iterable[bytes]) -> None:
        with self._lock:
            for digest in digests:
                if digest in self._places:
                    self._by_use[self._places[digest][0]].move_to_end(digest)

    def set_priority(self, digest: bytes, priority: int) -> None:
        with self._lock:
            if digest in self._places:
                self._add(digest, priority, self._remove(digest))

    def refresh(self) -> None:
        """There are no others."""

    def _at(self, place: int) -> memoryview:
        return self._memory[place * self._page_bytes : (place + 1) * self._page_bytes]

    def _add(self, digest: bytes, priority: int, place: int) -> None:
        self._places[digest] = (priority, place)
        self._by_use.setdefault(priority, OrderedDict())[digest] = None

    def _remove(self, digest: bytes) -> int:
        priority, place = self._places.pop(digest)
        del self._by_use[priority][digest]
        return place

    def _give_up(self, most: int) -> bool:
        """Free the place of a page whose priority is ``most`` or less; False where there is none."""
        worth = min((priority for priority, digests in self._by_use.items() if digests), default=most + 1)
        if worth > most:
            return False
        self._free.append(self._remove(next(iter(self._by_use[worth]))))
        return True
