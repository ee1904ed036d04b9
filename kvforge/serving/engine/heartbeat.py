"""What the engine process's main thread says of itself, in memory that it shares with its stub.

A beat costs a fraction of a microsecond and passes where the socket between the two is full. It carries an allowance:
the seconds that the piece of work which begins now may take.
"""

import mmap
import os

LOAD_S = 300.0
"""From the start of the process until the engine is loaded."""
_BEATS, _ALLOWANCE = 0, 1
_SIZE = 16


class Heartbeat:
    """Two numbers of eight bytes: how many beats there were, and the last one's allowance. One thread beats, another
    one reads; each number is read as it was written, but one may be a beat older than the other.

    `fd` is a memory file, which `EngineClient` makes and the engine process inherits. Raises OSError.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._numbers = memoryview(self._map).cast("d")

    @classmethod
    def create(cls) -> "Heartbeat":
        """A new one, which allows for the start of a process. Raises OSError."""
        fd = os.memfd_create("kvforge-heartbeat")
        try:
            os.ftruncate(fd, _SIZE)
            heartbeat = cls(fd)
        except OSError:
            os.close(fd)
            raise
        heartbeat.beat(LOAD_S)
        return heartbeat

    def beat(self, allowance_s: float) -> None:
        """Say that the thread lives, and that the next beat comes within `allowance_s` seconds."""
        self._numbers[_ALLOWANCE] = allowance_s
        self._numbers[_BEATS] += 1.0

    def read(self) -> tuple[float, float]:
        """(number of beats, allowance of the last one in seconds)."""
        return self._numbers[_BEATS], self._numbers[_ALLOWANCE]

    def close(self) -> None:
        """Give the memory back; the other side keeps its own view."""
        self._numbers.release()
        self._map.close()
        os.close(self.fd)
