"""A service manager's end of NOTIFY_SOCKET."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WAIT_S = 60.0


@dataclass(frozen=True)
class NotifySocket:
    """``name`` is for NOTIFY_SOCKET."""

    name: str
    _socket: socket.socket

    def until(self, last: str) -> list[str]:
        """The messages up to ``last``; TimeoutError where no more come."""
        messages = [""]
        while messages[-1] != last:
            messages.append(self._socket.recv(65536).decode())
        return messages[1:]


@contextlib.contextmanager
def listening(folder: Path, is_abstract: bool = False) -> Iterator[NotifySocket]:
    """A socket in ``folder``, or at an abstract name made of it."""
    name = f"@kvforge{folder}" if is_abstract else str(folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind("\0" + name[1:] if is_abstract else name)
        made.settimeout(WAIT_S)
        yield NotifySocket(name, made)
