"""An experiment's process: `python -m perf.gpu.queue.child MODULE [ARGUMENTS]`, in a group of its own, ended with the
queue."""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
