"""A worker program that does what its jobs say, the worst included."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvforge.workers import serve


class Panic(BaseException):
    """As pyo3's, which no `except Exception` holds."""


def handle(job: bytes) -> bytes:
    kind, _, rest = job.partition(b" ")
    if kind == b"echo":
        return rest
    if kind == b"pid":
        return str(os.getpid()).encode()
    if kind == b"big":
        return b"x" * int(rest)
    if kind == b"take":
        return str(len("a" * int(rest))).encode()
    if kind == b"raise":
        raise Panic("the matcher\nis gone")
    if kind == b"crash":
        ctypes.string_at(0)
    if kind == b"exit":
        os._exit(7)
    if kind == b"print":
        print("in the middle of an answer", flush=True)
        subprocess.run(["echo", "and this"], check=True)
        return sys.stdin.read().encode()
    if kind == b"sleep":
        time.sleep(float(rest))
    if kind == b"until":
        while not Path(rest.decode()).exists():
            time.sleep(0.01)
    if kind == b"stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == b"native":  # holds the interpreter's lock for ever, and no signal handler of Python runs
        ctypes.PyDLL(None).select(0, None, None, None, None)
    if kind == b"spin":
        while True:
            pass
    if kind == b"core":
        return str(resource.getrlimit(resource.RLIMIT_CORE)).encode()
    return b""


def prepare():
    if len(sys.argv) > 1:
        log = Path(sys.argv[1])
        is_first = not log.exists()
        with log.open("a") as file:
            file.write("prepared\n")
        if sys.argv[2:] == ["first"] and not is_first:
            time.sleep(1000)
        if sys.argv[2:] == ["fail"]:
            raise ValueError("no such tokenizer")
    ballast = bytearray(300 << 20)  # what preparations take does not count
    return lambda job: handle(job) if ballast else b""


serve(prepare)
