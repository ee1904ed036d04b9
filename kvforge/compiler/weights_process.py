"""A process of its own that writes an engine's weights, while this one exports and compiles the graphs."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kvforge.checkpoint.model import open_model
from kvforge.common.child_process import end_with_parent, ending, module_environment
from kvforge.common.errors import BuildError, KvforgeError
from kvforge.compiler.convert import Converted, convert_weights

_SAID = (KvforgeError, OSError, MemoryError)
"""What the process answers with when it fails; any other error is on its standard error."""


class WeightsProcess:
    """The process, as the one that has begun it sees it."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._answer: tuple[Converted, str] | None = None

    def check(self) -> None:
        """Raise what ``wait`` raises, if the process has failed."""
        if self._process.poll() is not None:
            self.wait()

    def wait(self, converted: Callable[[int, int], object] = lambda done, total: None) -> tuple[Converted, str]:
        """Return what ``convert_weights`` did when the weights are written, and the checkpoint's SHA-256, for which
        it was read meanwhile; ``converted`` as ``convert_weights`` calls its ``progress``, but a hundred times or so.

        Raises:
            BuildError: the process ended without an answer.
            KvforgeError, OSError, MemoryError: what ``convert_weights`` raised there.
        """
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # it ended, perhaps in the middle of an answer
            while self._answer is None:
                kind, what = pickle.load(self._process.stdout)
                if kind == "error":
                    raise what
                if kind == "converted":
                    converted(*what)
                else:
                    self._answer = what
        if self._answer is None:
            code = self._process.wait()
            raise BuildError(
                f"The process that writes the weights ended without an answer ({ending(code)}); "
                + ("a machine with more memory helps." if code == -signal.SIGKILL else "what it said is above.")
            )
        return self._answer


@contextlib.contextmanager
def weights_process(checkpoint: str | Path, **arguments: Any) -> Iterator[WeightsProcess]:
    """Begin ``convert_weights`` of the checkpoint at a path, with these further arguments and as many threads as here;
    the process ends with the block."""
    # Not -m, which warns of a module that its package imports. The folder that the user is in has no modules of ours.
    begin = f"import sys; sys.path = [one for one in sys.path if one]; from {__name__} import main; main()"
    started = subprocess.Popen(
        [sys.executable, "-c", begin],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=module_environment(OMP_WAIT_POLICY="passive"),  # threads that spin would take the compiler's core
        start_new_session=True,  # Ctrl-C is for this process
    )
    with started as process:
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it ended at once; its code says how
                pickle.dump((os.getpid(), checkpoint, torch.get_num_threads(), arguments), process.stdin)
            yield WeightsProcess(process)
        finally:
            process.kill()


def main() -> None:
    """Write weights as standard input says; answers are pickles on standard output."""
    end_with_parent()
    parent, path, num_threads, arguments = pickle.load(sys.stdin.buffer)
    if os.getppid() != parent:
        return  # it had ended before
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # nothing that libraries print gets into the answers
        shown = -1

        def say(kind: str, what: Any) -> None:
            pickle.dump((kind, what), answers)
            answers.flush()

        def converted(done: int, total: int) -> None:
            nonlocal shown
            if (hundredth := 100 * done // max(1, total)) > shown:  # a pipe takes them all, read or not
                shown = hundredth
                say("converted", (done, total))

        torch.set_num_threads(num_threads)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the process that has begun this one has opened it, too
                checkpoint = open_model(path)
            reading = ThreadPoolExecutor(max_workers=1).submit(checkpoint.sha256)
            written = convert_weights(checkpoint, progress=converted, **arguments)
            say("written", (written, reading.result()))
        except _SAID as error:
            say("error", error)
