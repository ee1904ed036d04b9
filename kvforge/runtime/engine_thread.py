"""An engine in a thread of its own, which alone calls it."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvforge.common.errors import EngineError, first_line
from kvforge.runtime.interface import Engine
from kvforge.runtime.requests.outputs import SequenceOutput

T = TypeVar("T")
CLOSED = "the engine was shut down; start it again."


class EngineThread:
    """Steps an engine while it has requests. What others want of it is carried out between steps, in their order.

    Args:
        load: makes the engine, in the thread.
        deliver: gets the outputs of each step, in the thread.
        ended: is told once, in the thread, why there will be no more outputs.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        deliver: Callable[[list[SequenceOutput]], None],
        ended: Callable[[EngineError], None],
    ) -> None:
        self._load, self._deliver, self._on_end = load, deliver, ended
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[Engine], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._end: EngineError | None = None
        self.loaded: Future[Engine] = Future()
        """The engine; raises what loading it raised."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Engine], T]) -> "Future[T]":
        """What ``function`` returns or raises; EngineError where the thread has ended. It is not called where the
        future is cancelled before its turn."""
        future: Future[T] = Future()
        with self._lock:
            if self._end is None:
                self._calls.put((future, function))
            else:
                future.set_exception(self._end)
        return future

    def close(self) -> None:
        """End the thread after the step it is in. Requests that are open get no further outputs. Idempotent."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:
            self._finish(EngineError(f"the engine could not be loaded ({first_line(error)})."))
            self.loaded.set_exception(error)
            return
        self.loaded.set_result(engine)
        end = EngineError(CLOSED)
        try:
            while self._carry_out(engine):
                if engine.has_unfinished() and (outputs := engine.step()):
                    self._deliver(outputs)
        except BaseException as error:
            end = EngineError(f"the engine failed ({type(error).__name__}: {first_line(error)}); start it again.")
        self._finish(end)

    def _carry_out(self, engine: Engine) -> bool:
        """Answer all calls there are, with nothing to compute wait for one; False ends the thread."""
        block = not engine.has_unfinished()
        while True:
            try:
                entry = self._calls.get(block=block)
            except queue.Empty:
                return True
            if entry is None:
                return False
            block = False
            future, function = entry
            if not future.set_running_or_notify_cancel():
                block = not engine.has_unfinished()
                continue
            try:
                future.set_result(function(engine))
            except BaseException as error:  # belongs to who called, whatever it is
                future.set_exception(error)

    def _finish(self, end: EngineError) -> None:
        with self._lock:
            self._end = end
        while True:
            try:
                entry = self._calls.get_nowait()
            except queue.Empty:
                break
            if entry is not None and entry[0].set_running_or_notify_cancel():
                entry[0].set_exception(end)
        self._on_end(end)
