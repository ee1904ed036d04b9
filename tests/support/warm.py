"""Python programs without the start of Python: a process that has imported torch forks one for each.

``run(arguments)`` is ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`` for ``-m MODULE``
and ``-c CODE``, with ``-W`` before them. What OpenMP and OpenBLAS read when they are loaded is that process's.
Each command has one test that truly starts it.
"""

import array
import atexit
import contextlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_HEAD = 4
"""Bytes that say how long a message is."""


class _Server:
    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())]
            env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            fds = [theirs.fileno()]
            self.process = subprocess.Popen(command, env=env, pass_fds=fds, stdin=subprocess.DEVNULL)
        atexit.register(self.end)

    def run(self, job: dict[str, Any], fds: Sequence[int]) -> int:
        data = json.dumps(job).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self._sock.sendmsg([len(data).to_bytes(_HEAD, "big")], rights)
        self._sock.sendall(data)
        return int.from_bytes(_exactly(self._sock, _HEAD), "big", signed=True)

    def end(self) -> None:
        self._sock.close()
        self.process.wait()


_server: _Server | None = None


def run(
    arguments: Sequence[str], env: dict[str, str] | None = None, cwd: str | Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Return what it printed, and its exit status or the negative number of the signal that ended it."""
    global _server
    if _server is None or _server.process.poll() is not None:
        _server = _Server()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        job = {"arguments": list(arguments), "env": dict(os.environ if env is None else env), "cwd": str(cwd)}
        status = _server.run(job, [out.fileno(), err.fileno()])
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess([sys.executable, *arguments], status, *said)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("the warm process has ended")
        data += part
    return data


def _serve(sock: socket.socket) -> None:
    while True:
        head, rights, _, _ = sock.recvmsg(_HEAD, socket.CMSG_SPACE(8))
        if not head:
            return
        fds = array.array("i")
        for _, _, data in rights:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        job = json.loads(_exactly(sock, int.from_bytes(head + _exactly(sock, _HEAD - len(head)), "big")))
        assert len(os.listdir("/proc/self/task")) == 1, "a fork has only one thread of a process that has several"
        pid = os.fork()
        if pid == 0:
            sock.close()
            _become(job, list(fds))
        for fd in fds:
            os.close(fd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sock.sendall(status.to_bytes(_HEAD, "big", signed=True))


def _become(job: dict[str, Any], fds: list[int]) -> None:
    """Run a program in this process, as Python does, and end it."""
    status = 1
    try:
        for fd, standard in zip(fds, (1, 2), strict=True):
            os.dup2(fd, standard)
            os.close(fd)
        os.environ.clear()
        os.environ.update(job["env"])
        os.chdir(job["cwd"])
        arguments = job["arguments"]
        while arguments[0] == "-W":
            warnings._processoptions([arguments[1]])  # type: ignore[attr-defined]
            arguments = arguments[2:]
        option, program, *rest = arguments
        added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [job["cwd"], *filter(None, added)]
        sys.argv = [option, *rest]
        if option == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), vars(main))
        status = 0
    except SystemExit as error:
        status = _status_of(error)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def _status_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    import torch  # noqa: F401

    _serve(socket.socket(fileno=int(sys.argv[1])))
