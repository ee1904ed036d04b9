"""Which requests have run out of time."""

import heapq
import time

from kvforge.runtime.requests.sequence import Request


class Deadlines:
    """Requests by the monotonic time at which they are given up; finished ones are forgotten in time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, seconds: float, num_requests: int) -> None:
        """Give a request so many seconds from now; ``num_requests`` are open."""
        if len(self._heap) > 2 * num_requests + 64:
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (time.monotonic() + seconds, self._num_added, request))
        self._num_added += 1

    def pop_passed(self) -> list[Request]:
        """Take out the unfinished requests whose time has passed, the longest overdue first."""
        passed = []
        while self._heap and self._heap[0][0] <= time.monotonic():
            request = heapq.heappop(self._heap)[2]
            if not request.finished:
                passed.append(request)
        return passed
