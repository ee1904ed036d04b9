"""Keeps a server running: restarts it when one of its processes dies, drains it on a signal, says how it is."""

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from kvforge.common.errors import EngineReplacedError, KvforgeError
from kvforge.serving.health.canary import Canary
from kvforge.serving.health.probe import is_ready
from kvforge.serving.processes.run_dir import SILENT, EngineState
from kvforge.serving.server.launcher import TritonServer
from kvforge.serving.server.options import RestartPolicy, ServerOptions
from kvforge.serving.server.start_errors import StartCancelled, did_not_start
from kvforge.serving.server.stop_signals import StopSignals

logger = logging.getLogger("kvforge.serve")

POLL_S = 0.1
LIVE_WITHIN_S = 30.0
OVERSLEPT_S = 5.0
"""A look this late finds a machine that stood still: others have not run either, and are judged after as long again."""
MAX_PAUSE_S = 10.0


class Companion(Protocol):
    """A process beside the server that outlives the server's restarts, such as the OpenAI gateway."""

    def start(self, server: TritonServer, cancelled: Callable[[], bool]) -> None:
        """Start it in front of ``server``. Raises StartCancelled, and KvforgeError where it does not start."""

    def follow(self, server: TritonServer) -> None:
        """Take this server for the one that runs."""

    def failure(self) -> str | None:
        """Return why it does not serve, or None."""

    def drain(self) -> None:
        """Let in nothing new."""

    def stop(self) -> None:
        """End it. Idempotent."""


class Supervisor:
    """Runs one TritonServer after the other on the same ports.

    `run` is for the main thread; `report` may be called from any.
    """

    def __init__(
        self,
        engine_dir: Path,
        options: ServerOptions,
        signals: StopSignals,
        policy: RestartPolicy | None = None,
        canary: Canary | None = None,
        companion: Companion | None = None,
    ) -> None:
        self._engine_dir = engine_dir
        self._options = options
        self._signals = signals
        self._policy = policy or RestartPolicy()
        self._canary = canary
        self._companion = companion
        self._server = TritonServer(engine_dir, options)
        self._phase = "starting"
        self._restarts: list[float] = []
        self._num_restarts = 0
        self._engine_pid: int | None = None
        self._num_engine_restarts = 0
        self._looked_at = time.monotonic()

    def run(self, announce: Callable[[TritonServer], None], draining: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal; `announce` is called once, when the first server is ready, `draining` when it came.

        Raises KvforgeError when the server does not start, or dies more often than the policy allows.
        """
        try:
            self._server.start(self._signals.stop)
            if self._companion is not None:
                self._companion.start(self._server, self._signals.stop)
                if (failure := self._server.failure()) is not None:  # meanwhile
                    raise did_not_start(failure)
            self._serving()
            announce(self._server)
            while not self._signals.stop():
                if self._overslept():
                    continue
                if (failure := self._server.failure()) is not None:
                    self._recover(failure)
                elif self._companion is not None and (failure := self._companion.failure()) is not None:
                    self._replace_companion(self._companion, failure)
                self._look_for_another_engine()
                time.sleep(POLL_S)
            draining()
            logger.info("draining for at most %g s", self._options.drain_timeout_s)
        except StartCancelled:
            pass
        finally:
            self._phase = "draining"
            if self._companion is not None:
                self._companion.drain()
            self._server.stop(self._signals.hurry)
            if self._companion is not None:
                self._companion.stop()
            logger.info("stopped")

    def _overslept(self) -> bool:
        """Look at the clock; where the last look was long ago, give the server's processes time to say how they are."""
        last, self._looked_at = self._looked_at, time.monotonic()
        if self._looked_at - last <= OVERSLEPT_S:
            return False
        until = self._looked_at + OVERSLEPT_S
        while self._looked_at < until and not self._signals.stop():
            time.sleep(POLL_S)
            self._looked_at = time.monotonic()
        return True

    def _look_for_another_engine(self) -> None:
        """Say that the stub has started the engine's process again: its own log goes elsewhere, or nowhere."""
        state = self._server.state
        if state is None or state.engine != "ready" or state.engine_pid == self._engine_pid:
            return
        if self._engine_pid is not None:
            self._num_engine_restarts += 1
            logger.error("the engine process %d ended; process %d serves now", self._engine_pid, state.engine_pid)
        self._engine_pid = state.engine_pid

    def _serving(self) -> None:
        """The start may have taken longer than LIVE_WITHIN_S: it is now that the main thread looks again."""
        self._looked_at = time.monotonic()
        self._phase = "serving"

    def _recover(self, failure: str) -> None:
        """End what is left of the server and start another with the same engine; a start that fails is a failure like
        the first. Raises EngineReplacedError when that engine is not there any more."""
        ports: dict[str, Any] = {f"{name}_port": port for name, port in self._server.ports.items()}
        engine = self._server.options.manifest_sha256
        options = dataclasses.replace(self._options, **ports, manifest_sha256=engine)
        self._phase = "restarting"
        while True:
            started = time.monotonic()
            self._server.stop(hurry=lambda: True)
            self._count_restart(failure)
            self._engine_pid = None  # the server's end is said already
            self._server = TritonServer(self._engine_dir, options)
            try:
                self._server.start(self._signals.stop)
                if self._companion is not None:
                    self._companion.follow(self._server)
            except (StartCancelled, EngineReplacedError):  # another engine does not go away by waiting
                raise
            except KvforgeError as error:
                failure = str(error)
                continue
            logger.warning("serving again after %.1f s", time.monotonic() - started)
            self._serving()
            return

    def _replace_companion(self, companion: Companion, failure: str) -> None:
        self._phase = "restarting"
        while True:
            self._count_restart(failure)
            try:
                companion.start(self._server, self._signals.stop)
                self._serving()
                return
            except StartCancelled:
                raise
            except KvforgeError as error:
                failure = str(error)

    def _count_restart(self, failure: str) -> None:
        """Say that something is started again, after a pause that grows. Raises KvforgeError when it was too often."""
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < self._policy.window_s]
        if len(self._restarts) >= self._policy.max_restarts:
            raise KvforgeError(self._last_words(failure))
        logger.error("%s; starting it again (%d)", failure, self._num_restarts + 1)
        self._pause(len(self._restarts))
        self._restarts.append(now)
        self._num_restarts += 1

    def _pause(self, num_restarts: int) -> None:
        """None before the first restart, then twice as long each time."""
        until = time.monotonic() + (min(0.5 * 2**num_restarts, MAX_PAUSE_S) if num_restarts else 0.0)
        while time.monotonic() < until and not self._signals.stop():
            time.sleep(POLL_S)

    def _last_words(self, failure: str) -> str:
        if not self._policy.max_restarts:
            return f"{failure}; its last words: {self._server.log_error()}"
        return (
            f"{failure}, after {len(self._restarts)} restarts within {self._policy.window_s:.0f} s; "
            f"the server's last words: {self._server.log_error()}"
        )

    def report(self) -> dict[str, Any]:
        """What the health endpoint answers: live, ready, the reasons against, and the engine's state."""
        server = self._server  # `run` may put another in its place meanwhile
        state = server.state
        reasons = self._reasons(server)
        return {
            "live": self._is_live(state),
            "ready": not reasons,
            "reasons": reasons,
            "engine": None if state is None else state.engine,
            "active": None if state is None else state.active,
            "restarts": self._num_restarts,
            "engine_restarts": self._num_engine_restarts,
        }

    def _is_live(self, state: EngineState | None) -> bool:
        """Whether this process looks after the server, and no process that serves is frozen."""
        if self._phase != "serving":
            return True
        is_frozen = state is not None and state.is_frozen
        return time.monotonic() - self._looked_at < LIVE_WITHIN_S and not is_frozen

    def _reasons(self, server: TritonServer) -> list[str]:
        if self._signals.stop() or self._phase != "serving":
            return ["the server is " + ("shutting down" if self._signals.stop() else self._phase)]
        reasons = []
        if (failure := server.failure()) is not None:
            reasons.append(failure)
        if self._companion is not None and (failure := self._companion.failure()) is not None:
            reasons.append(failure)
        state = server.state
        problem = SILENT if state is None else state.problem
        if problem is not None:
            reasons.append(problem)
        if not is_ready(server.http_url):
            reasons.append("tritonserver is not ready")
        if self._canary is not None and (failure := self._canary.failure()) is not None:
            reasons.append(failure)
        return reasons
