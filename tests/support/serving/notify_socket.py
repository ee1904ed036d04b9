"""A service manager's end of NOTIFY_SOCKET."""

import socket
import time
from pathlib import Path
from types import TracebackType

WAIT_S = 60.0


class NotifySocket:
    """Listens in ``folder``, or at an abstract name made of it; ``name`` is for NOTIFY_SOCKET."""

    def __init__(self, folder: Path, is_abstract: bool = False) -> None:
        self.name = f"@kvforge{folder}" if is_abstract else str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self.name[1:] if is_abstract else self.name)
        self._socket.settimeout(WAIT_S)

    def next(self) -> str:
        return self._socket.recv(65536).decode()

    def until(self, last: str) -> list[str]:
        """The messages up to ``last``; TimeoutError where it does not come."""
        messages, deadline = [self.next()], time.monotonic() + WAIT_S
        while messages[-1] != last:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {last} in {messages}")
            messages.append(self.next())
        return messages

    def waiting(self) -> list[str]:
        """The messages that have come."""
        self._socket.setblocking(False)
        messages = []
        while True:
            try:
                messages.append(self.next())
            except BlockingIOError:
                self._socket.settimeout(WAIT_S)
                return messages

    def __enter__(self) -> "NotifySocket":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
