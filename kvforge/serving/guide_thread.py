"""The engine process's guides: compiled beside its step loop, which goes on meanwhile."""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from kvforge.errors import RequestError
from kvforge.serving.protocol import Message

logger = logging.getLogger("kvforge.engine")

NICENESS = 5
GUIDE = "guide"
"""Of an `add` command: the verdict on its guide as data; this thread puts the compiled guide in its place."""


class GuideThread:
    """Compiles the guides of `add` commands one after another and passes the commands on.

    `compile_guide` returns a guide for a command or raises RequestError; `forward` takes the commands in their
    order, `refuse` those that failed, with why. llguidance lets other threads run while it compiles.
    """

    def __init__(
        self,
        compile_guide: Callable[[Message], Any],
        forward: Callable[[Message], None],
        refuse: Callable[[Message, str], None],
    ) -> None:
        self._compile, self._forward, self._refuse = compile_guide, forward, refuse
        self._commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        threading.Thread(target=self._run, name="guides", daemon=True).start()

    def put(self, command: Message) -> None:
        """Any command of the stub's: those with a guide wait here, others pass at once. An `abort` of a request that
        waits ends it."""
        if command["op"] == "add" and command.get(GUIDE) is not None:
            with self._lock:
                self._waiting.add(command["id"])
            self._commands.put(command)
            return
        if command["op"] == "abort":
            with self._lock:
                self._waiting.discard(command["id"])
        self._forward(command)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            command = self._commands.get()
            if command["id"] not in self._waiting:
                continue
            try:
                command[GUIDE] = self._compile(command)
            except RequestError as error:
                self._refuse(command, str(error))
            except BaseException:  # of native code, too; one request must not end the guides of all others
                logger.exception("a guide could not be compiled")
                self._refuse(command, "the guide could not be compiled; change it")
            else:
                with self._lock:
                    if command["id"] in self._waiting:
                        self._forward(command)
            with self._lock:
                self._waiting.discard(command["id"])
