"""An experiment's process: `python -m perf.gpu.queue.child QUEUE MODULE [ARGUMENTS]`, where QUEUE is the process that
waits for it. It runs the module in a group of its own, which ends with the queue, or when the module ends."""

import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1


def end_group(*_: int | FrameType | None) -> None:
    """Kill this process and all that were started below it."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, end_group)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # the queue was killed before it could be told
        end_group()
    status = subprocess.call([sys.executable, "-m", *sys.argv[2:]])
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
