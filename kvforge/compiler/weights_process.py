"""A process of its own that writes an engine's weights, while this one exports and compiles the graphs."""

import contextlib
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvforge.checkpoint.model import open_model
from kvforge.common.child_process import end_with_parent, ending, module_environment
from kvforge.common.errors import BuildError, KvforgeError
from kvforge.compiler.convert import convert_weights

_SAID = (KvforgeError, OSError, MemoryError)
"""What the process answers with when it fails; any other error is on its standard error."""


class WeightsProcess:
    """The process, as the one that has begun it sees it."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._num_parameters: int | None = None

    def check(self) -> None:
        """Raise what ``wait`` raises, if the process has failed."""
        if self._process.poll() is not None:
            self.wait()

    def wait(self, converted: Callable[[int, int], object] = lambda done, total: None) -> int:
        """Return the number of parameters when the weights are written; ``converted`` as ``convert_weights`` calls its
        ``progress``, but a hundred times or so.

        Raises:
            BuildError: the process ended without an answer.
            KvforgeError, OSError, MemoryError: what ``convert_weights`` raised there.
        """
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # it ended, perhaps in the middle of an answer
            while self._num_parameters is None:
                kind, what = pickle.load(self._process.stdout)
                if kind == "error":
                    raise what
                if kind == "converted":
                    converted(*what)
                else:
                    self._num_parameters = what
        if self._num_parameters is None:
            raise BuildError(
                f"The process that writes the weights ended without an answer ({ending(self._process.wait())}); what "
                "it said is above, and a machine with more memory helps if it was killed."
            )
        return self._num_parameters


@contextlib.contextmanager
def weights_process(checkpoint: str | Path, **arguments: Any) -> Iterator[WeightsProcess]:
    """Begin ``convert_weights`` of the checkpoint at a path, with these further arguments and as many threads as here;
    the process ends with the block."""
    no_folder = "import sys; sys.path[:] = filter(None, sys.path)"  # no modules of the current folder, as here
    command = [sys.executable, "-c", f"{no_folder}; from {__name__} import main; main()"]
    started = subprocess.Popen(
        command,
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
            say("written", convert_weights(checkpoint, progress=converted, **arguments))
        except _SAID as error:
            say("error", error)
