"""Carries what tritonserver and its processes print to where the operator wants it, and keeps the last lines."""

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvforge.common.errors import KvforgeError
from kvforge.serving.logs.lines import as_json, is_harmless
from kvforge.serving.logs.request_log import JsonFormatter, TextFormatter

KEPT_LINES = 1000
STDERR = Path("-")
"""A log file that means the standard error of the process that starts the server."""


class LogSink:
    """Appends lines to a file, to standard error, or nowhere. A full disk loses lines, never the server.

    Raises KvforgeError when the file cannot be opened.
    """

    def __init__(self, path: Path | None, log_format: str = "text") -> None:
        self._path = path
        self.log_format = log_format
        self._lock = threading.Lock()
        self._failed = False
        self._fd: int | None = None
        if path == STDERR:
            self._fd = os.dup(2)
        elif path is not None:
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise KvforgeError(
                    f"cannot write the log to {path} ({error.strerror}): give another --log-file"
                ) from None

    def write(self, line: str) -> None:
        """Append one line; lines stay whole when several threads write."""
        if self._fd is None:
            return
        data = (as_json(line) if self.log_format == "json" else line).encode(errors="replace") + b"\n"
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
                self._failed = False
            except OSError as error:
                if not self._failed:
                    self._failed = True
                    _say(f"kvforge: the log {self._path} cannot be written ({error.strerror}); lines are lost")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class LogPump:
    """A thread that moves lines from a pipe to a sink until the pipe's last writer has ended. Harmless ones it
    keeps, but does not write."""

    def __init__(self, pipe: IO[bytes], sink: LogSink) -> None:
        self._pipe = pipe
        self._sink = sink
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._thread = threading.Thread(target=self._run, name="log-pump", daemon=True)
        self._thread.start()

    def lines(self) -> list[str]:
        """The last lines, oldest first."""
        return list(self._lines)

    def join(self, timeout_s: float) -> None:
        """Wait until everything written before the writers ended is in the sink."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with contextlib.closing(self._pipe):
            for raw in self._pipe:
                line = raw.decode(errors="replace").rstrip("\n")
                self._lines.append(line)
                if not is_harmless(line):
                    self._sink.write(line)


class _SinkHandler(logging.Handler):
    def __init__(self, sink: LogSink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        self._sink.write(self.format(record))


@contextlib.contextmanager
def log_to(sink: LogSink, level: str) -> Iterator[None]:
    """Send kvforge's own log records of this process to `sink`, which is closed at the end."""
    logger = logging.getLogger("kvforge")
    handler = _SinkHandler(sink)
    handler.setFormatter(JsonFormatter() if sink.log_format == "json" else TextFormatter())
    previous = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(previous)
        sink.close()


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
