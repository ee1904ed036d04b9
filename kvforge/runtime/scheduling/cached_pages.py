"""Cached pages in the order in which they are given up."""

from collections import OrderedDict
from collections.abc import Iterator

NUM_PRIORITIES = 101


class CachedPages:
    """Pages of priorities 0 to 100: the lowest priority goes first, and of one priority the page added first.

    A queue for each priority, and one integer whose set bits are the queues that are not empty.
    """

    def __init__(self) -> None:
        self._queues: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(NUM_PRIORITIES)]
        self._occupied = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        """The pages in the order of ``pop``."""
        return (page for queue in self._queues for page in queue)

    def add(self, page: int, priority: int) -> None:
        """Add a page that is not there."""
        self._queues[priority][page] = None
        self._occupied |= 1 << priority
        self._size += 1

    def remove(self, page: int, priority: int) -> None:
        """Take out a page that was added with ``priority``."""
        del self._queues[priority][page]
        self._taken(priority)

    def pop(self) -> int:
        """Take out the page to give up first; there must be one."""
        priority = (self._occupied & -self._occupied).bit_length() - 1
        page, _ = self._queues[priority].popitem(last=False)
        self._taken(priority)
        return page

    def _taken(self, priority: int) -> None:
        self._size -= 1
        if not self._queues[priority]:
            self._occupied &= ~(1 << priority)
