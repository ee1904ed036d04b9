"""What is preloaded into tritonserver: a model's process that is only slow keeps its request, a thread of HTTP that is
only slow gets its responses, all other waits end."""

import errno
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvforge.serving.processes.run_dir import make_run_dir
from kvforge.serving.server import triton_waits
from kvforge.serving.server.triton_waits import PRELOAD, with_waits

CALLER = Path(__file__).resolve().parents[3] / "support" / "serving" / "semaphore_caller.cpp"
PYTHON_BACKEND = "libtriton_python.so"
PROGRAM = """
import ctypes, json, os, subprocess, sys, threading
caller, child, posts = sys.argv[1:]
library = ctypes.CDLL(caller)
running = subprocess.Popen([sys.executable, "-c", "input()" if child == "lives" else ""], stdin=subprocess.PIPE)
if child == "ends":
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
if posts == "posts":
    threading.Timer(1.5, library.post_it).start()
print(json.dumps([library.wait_for_it(), os.environ.get("LD_PRELOAD")]))
running.kill()
"""
FULL = """
import socket, sys, threading, time
family, reads = sys.argv[1:]
if family == "unix":
    ends = socket.socketpair()
else:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = socket.create_connection(listener.getsockname()), listener.accept()[0]
for end in ends:
    end.setblocking(False)
def read_late():
    time.sleep(1.0)
    ends[1].setblocking(True)
    while ends[1].recv(1 << 20):
        pass
threading.Thread(target=read_late, daemon=True).start() if reads == "reads" else None
begun, sent = time.monotonic(), 0
try:
    while time.monotonic() < begun + 1.5 and sent < 1 << 30:
        sent += ends[0].send(bytes(24))
    print("waited")
except BlockingIOError:
    print("full", time.monotonic() - begun >= 1.9)
"""
"""As libevhtp's threads hand each other their work, but that it does not look whether there was room."""


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("callers")
    for name in (PYTHON_BACKEND, "libother.so"):
        subprocess.run(["g++", "-shared", "-fPIC", "-o", folder / name, CALLER], check=True)
    return folder


def waited(environment: dict[str, str], *arguments: object) -> tuple[int, str | None]:
    """What the wait gave, and what children of the process are given to preload."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    status, preload = json.loads(result.stdout)
    return status, preload


def without_preload() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != PRELOAD}


def test_a_process_that_lives_is_waited_for(callers: Path, tmp_path: Path) -> None:
    environment = with_waits(without_preload(), tmp_path)
    backend = callers / PYTHON_BACKEND
    assert waited(environment, backend, "lives", "posts") == (0, None)
    assert waited(environment, backend, "ends", "nothing") == (errno.ETIMEDOUT, None)
    assert waited(environment, callers / "libother.so", "lives", "nothing") == (errno.ETIMEDOUT, None)
    assert waited(without_preload(), backend, "lives", "posts") == (errno.ETIMEDOUT, None)


def test_patience_has_an_end(callers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_waits, "HUNG_AFTER_S", 2.0)
    environment = with_waits(without_preload(), tmp_path)
    assert waited(environment, callers / PYTHON_BACKEND, "lives", "nothing") == (errno.ETIMEDOUT, None)


def test_a_full_pair_of_sockets_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_waits, "HTTP_PATIENCE_S", 2.0)
    environment = with_waits(without_preload(), tmp_path)

    def said(environment: dict[str, str], *arguments: str) -> tuple[str, str]:
        command = [sys.executable, "-c", FULL, *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        return result.stdout.strip(), result.stderr

    assert said(environment, "unix", "reads") == ("waited", "")
    assert said(without_preload(), "unix", "reads") == ("full False", "")
    assert said(environment, "inet", "never") == ("full False", "")
    what, error = said(environment, "unix", "never")
    assert what == "full True" and "a response over HTTP is lost" in error and "stood still for 2000 ms" in error


def test_what_else_is_preloaded_stays(callers: Path, tmp_path: Path) -> None:
    others = f"{callers / 'libother.so'}:/nowhere.so"
    environment = with_waits({**without_preload(), PRELOAD: others}, tmp_path)
    assert environment[PRELOAD] == f"{tmp_path / 'triton_waits.so'}:{others}"
    assert waited(environment, callers / PYTHON_BACKEND, "lives", "posts") == (0, others)


def test_without_a_compiler_tritonserver_starts_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO):
        assert with_waits({"A": "b"}, tmp_path) == {"A": "b"}
    assert "there is no 'no-such-compiler'" in caplog.text
    monkeypatch.setenv("CXX", "false")
    assert with_waits({"A": "b"}, tmp_path) == {"A": "b"}
    assert "stub_waits.cpp and http_waits.cpp did not compile (no message)" in caplog.text


NO_LIBRARY = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo nothing > "$2"
"""


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("this is no program", r"/cxx cannot be run \(Exec format error\)"),
        ("#!/bin/sh\nexec sleep 600\n", "/cxx did not end in 1 s"),
        (NO_LIBRARY, "/triton_waits.so, which .*/cxx made, cannot be preloaded"),
    ],
)
def test_with_a_compiler_that_is_none_tritonserver_starts_as_it_is(
    compiler: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cxx").write_text(compiler)
    (tmp_path / "cxx").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    if "sleep" in compiler:
        monkeypatch.setattr(triton_waits, "COMPILE_TIMEOUT_S", 1.0)
    with caplog.at_level(logging.INFO):
        assert with_waits({"A": "b"}, tmp_path) == {"A": "b"}
    assert re.search(message, caplog.text)


def test_a_folder_that_the_loader_takes_for_two_is_not_preloaded_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a server's folder have such a name."""
    folder = tmp_path / "a:b"
    folder.mkdir()
    with caplog.at_level(logging.INFO):
        assert with_waits({"A": "b"}, folder) == {"A": "b"}
    assert "a:b/triton_waits.so, which " in caplog.text and "cannot be preloaded" in caplog.text
    with tempfile.TemporaryDirectory(prefix="a:", dir="/tmp") as named:
        monkeypatch.setattr(tempfile, "tempdir", named)
        run_dir = make_run_dir()
        run_dir.rmdir()
    assert ":" not in str(run_dir)
