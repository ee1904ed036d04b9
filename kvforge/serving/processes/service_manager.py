"""Tells the service manager that started this process how it is: systemd's notifications, for `Type=notify`."""

import logging
import os
import socket
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

from kvforge.common.errors import MAX_LINE

logger = logging.getLogger("kvforge.serve")

PERIOD_S = 5.0
"""Between two looks at the server's state."""
SEND_TIMEOUT_S = 1.0
SERVING = "serving"
_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """The socket that ``NOTIFY_SOCKET`` names: a path, or ``@`` and an abstract name; without it nothing is told.

    Its variables leave ``environment``, so that no process started later speaks for this one. What cannot be sent is
    logged once.
    """

    def __init__(self, environment: MutableMapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        self._name, interval_us, pid = (environment.pop(variable, "") for variable in _VARIABLES)
        is_watched = interval_us.isdigit() and pid in ("", str(os.getpid()))
        self._watchdog_s = int(interval_us) / 1e6 if is_watched else 0.0
        self._status = ""
        self._has_failed = self._is_stopping = False
        self._closing = threading.Event()

    def status(self, text: str) -> None:
        """Show the first line of ``text``, cut where it is long, in `systemctl status`."""
        line = (text.splitlines() or [""])[0][:MAX_LINE]
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def ready(self) -> None:
        self.status(SERVING)
        self._send("READY=1")

    def stopping(self, text: str) -> None:
        """``text`` stays the status; a watchdog hears more until `close`."""
        self._is_stopping = True
        self._send("STOPPING=1")
        self.status(text)

    def follow(self, report: Callable[[], dict[str, Any]]) -> None:
        """Until `close`, on a thread, show the reasons against and feed a watchdog while the server is live.

        ``report`` returns {"live": bool, "reasons": [...], ...}.
        """
        if self._name:
            threading.Thread(target=self._follow, args=(report,), name="service-manager", daemon=True).start()

    def close(self) -> None:
        """Idempotent."""
        self._closing.set()

    def _follow(self, report: Callable[[], dict[str, Any]]) -> None:
        while not self._closing.wait(min(PERIOD_S, self._watchdog_s / 3 or PERIOD_S)):
            found = report()
            if self._watchdog_s and found["live"]:
                self._send("WATCHDOG=1")
            if not self._is_stopping:
                self.status("; ".join(found["reasons"]) or SERVING)

    def _send(self, message: str) -> None:
        if not self._name:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_TIMEOUT_S)
                sender.connect("\0" + self._name[1:] if self._name.startswith("@") else self._name)
                sender.sendall(message.encode(errors="backslashreplace"))  # a path may be no UTF-8
        except OSError as error:
            if not self._has_failed:
                logger.warning("NOTIFY_SOCKET=%s cannot be told %s: %s", self._name, message, error)
            self._has_failed = True
