"""The engine process's guides: compiled beside its step loop, which goes on meanwhile."""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from kvforge.common.errors import RequestError, let_end
from kvforge.common.refusals import Refusal
from kvforge.runtime.requests.guided_decoding import guide_error
from kvforge.serving.engine.protocol import Message

logger = logging.getLogger("kvforge.engine")

NICENESS = 5
"""By how much guides yield to the steps, whatever the process was started with."""
GUIDE = "guide"
"""Of an `add` command: the verdict on its guide as data."""
COMPILED = "compiled_guide"
"""Of an `add` command that comes back: the guide."""


class GuideThread:
    """Compiles the guides of `add` commands one after another; all methods belong to the thread of the step loop.

    `known_guide` returns the guide of a command where that is quick, else None; `compile_guide`, which runs beside the
    loop, returns it or raises RequestError. `come_back` takes commands with their guides, in their order, and `refuse`
    those that failed, with why. llguidance lets other threads run while it compiles.
    """

    def __init__(
        self,
        known_guide: Callable[[Message], Any],
        compile_guide: Callable[[Message], Any],
        come_back: Callable[[Message], None],
        refuse: Callable[[Message, Refusal], None],
    ) -> None:
        self._known, self._compile, self._come_back, self._refuse = known_guide, compile_guide, come_back, refuse
        self._commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._waiting: set[str] = set()
        threading.Thread(target=self._run, name="guides", daemon=True).start()

    def is_ready(self, command: Message) -> bool:
        """Whether an `add` command can be carried out, its guide in `COMPILED` where it has one. Else it comes back
        later; but one that has been aborted never does."""
        if command.get(GUIDE) is None:
            return True
        if COMPILED in command:
            wanted = command["id"] in self._waiting
            self._waiting.discard(command["id"])
            return wanted
        if (guide := self._quickly(command)) is not None:
            command[COMPILED] = guide
            return True
        self._waiting.add(command["id"])
        self._commands.put(command)
        return False

    def abort(self, request_id: str) -> None:
        """The request is not to come back."""
        self._waiting.discard(request_id)

    def _quickly(self, command: Message) -> Any:
        try:
            return self._known(command)
        except BaseException as error:
            let_end(error)
            return None  # to compile it says what is wrong

    def _run(self) -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(own + NICENESS, 19))
        while True:
            command = self._commands.get()
            if command["id"] not in self._waiting:
                continue
            try:
                command[COMPILED] = self._compile(command)
            except RequestError as error:
                self._give_up(command, error.refusal)
            except BaseException:  # of native code, too; one request must not end the guides of all others
                logger.exception("a guide could not be compiled")
                self._give_up(command, guide_error("could not be compiled", "change it").refusal)
            else:
                self._come_back(command)

    def _give_up(self, command: Message, why: Refusal) -> None:
        self._waiting.discard(command["id"])
        self._refuse(command, why)
