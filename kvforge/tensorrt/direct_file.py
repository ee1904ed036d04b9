"""A file that is written past the page cache, while its writer makes more."""

import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

PIECE_BYTES = 64 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """Collects what is written in pieces and writes each in a thread, past the page cache where the file system can.

    In the page cache a plan would take processor time for new pages (27.7 s of a build against 20.8: 4 layers of an 8B
    shape on an Intel Xeon), and push out the weights' file, which is read meanwhile. The caller keeps ``file`` open,
    and closes this first.
    """

    def __init__(self, file: BinaryIO, piece_bytes: int = PIECE_BYTES) -> None:
        """``piece_bytes`` is a multiple of a page."""
        self._fd = file.fileno()
        self._pieces = [mmap.mmap(-1, piece_bytes) for _ in range(2)]  # O_DIRECT wants whole pages
        self._used = 0
        self._thread = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None
        self._is_direct = bool(_DIRECT)
        self._set_direct(self._is_direct)

    def write(self, data: bytes) -> None:
        """Append; raises OSError where this or an earlier write fails."""
        left = memoryview(data)
        while left:
            piece = self._pieces[0]
            count = min(len(left), len(piece) - self._used)
            piece[self._used : self._used + count] = left[:count]
            self._used, left = self._used + count, left[count:]
            if self._used == len(piece):
                self._hand_over()

    def close(self) -> None:
        """Write what is left and wait for it; raises OSError as ``write`` does."""
        try:
            self._wait()
            self._set_direct(False)  # the last piece need not be whole pages
            self._write_all(memoryview(self._pieces[0])[: self._used])
        finally:
            self._thread.shutdown()

    def _hand_over(self) -> None:
        self._wait()
        self._written = self._thread.submit(self._write_all, memoryview(self._pieces[0]))
        self._pieces.reverse()
        self._used = 0

    def _wait(self) -> None:
        if self._written is not None:
            written, self._written = self._written, None
            written.result()

    def _write_all(self, left: memoryview) -> None:
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except OSError:
                if not self._is_direct:
                    raise
                self._set_direct(False)  # the file system cannot, or took a part: it says which when written as usual

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        self._is_direct = on
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
        except OSError:
            self._is_direct = False
