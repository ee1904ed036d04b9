"""A request of one token now and then, which finds what no process table shows: a model that hangs."""

import threading
import time

from kvforge.common.errors import KvforgeError
from kvforge.serving.health.probe import NoAnswerError, generate

TIMEOUT_S = 20.0


class Canary:
    """Asks `ensemble` for a token every `period_s` seconds, on a thread of its own, once it knows the server's URL.

    An error that the server answers, such as a full queue, is a sign of life; silence is not.
    """

    def __init__(self, period_s: float, timeout_s: float = TIMEOUT_S) -> None:
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._failure: str | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, http_url: str) -> None:
        self._thread = threading.Thread(target=self._run, args=(http_url,), name="canary", daemon=True)
        self._thread.start()

    def failure(self) -> str | None:
        """Why the last request got no answer, or None."""
        return self._failure

    def close(self) -> None:
        self._closing.set()

    def _run(self, http_url: str) -> None:
        while not self._closing.wait(self._period_s):
            started = time.monotonic()
            try:
                generate(http_url, "ensemble", {"text_input": "a", "max_tokens": 1}, self._timeout_s)
                self._failure = None
            except NoAnswerError as error:
                waited = time.monotonic() - started
                self._failure = f"a test request got no answer in {waited:.0f} s: {error}"
            except KvforgeError:  # it is answered, if only by a refusal
                self._failure = None
