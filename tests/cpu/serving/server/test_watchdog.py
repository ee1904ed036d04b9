"""How processes end whose server has ended, though they hang."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvforge.serving.processes.cleanup import GATEWAY_FOLDER, ServerResources, remove_gateway_folder

HANGS = """
import ctypes, threading, time
from kvforge.serving.processes import watchdog

watchdog.END_WITHIN_S = 1
removing = threading.Event()

def remove(leftovers):
    removing.set()
    time.sleep(0.1)  # the other thread gets the interpreter's lock

watchdog.ServerResources.remove = remove
threading.Thread(target=watchdog.end_with_server, args=({server},)).start()
removing.wait()
ctypes.PyDLL(None).pause()  # keeps the lock for ever
"""

GOES_ON = """
from kvforge.serving.processes import watchdog

watchdog.end_with_server({server})
print("serving")
"""

GATEWAY = """
import subprocess, sys

subprocess.Popen([sys.executable, "-c", '''
import pathlib, time
from kvforge.serving.processes import cleanup, watchdog

watchdog.exit_with_parent(lambda: cleanup.remove_gateway_folder(pathlib.Path("{server}")))
print("serving", flush=True)
time.sleep(60)
'''], stdout=sys.stdout)
input()
"""


def ended() -> subprocess.Popen:
    process = subprocess.Popen(["true"])
    process.wait()
    return process


def run(script: str, server: int, **environment: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", script.format(server=server)],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True, timeout=120,
    )  # fmt: skip


def test_who_loses_the_interpreters_lock_while_it_ends_the_others_ends_all_the_same(tmp_path: Path) -> None:
    orphan = ServerResources(ended().pid, tmp_path / "run", "")
    assert run(HANGS, ended().pid, **orphan.environment()).returncode < 0


@pytest.mark.parametrize("lives", [True, False])
def test_a_server_that_has_ended_is_asked_nothing_more(lives: bool) -> None:
    told = run(GOES_ON, os.getpid() if lives else ended().pid)
    assert (told.returncode, told.stdout) == ((0, b"serving\n") if lives else (1, b""))


def test_a_gateway_removes_its_folder_after_its_launcher(tmp_path: Path) -> None:
    mine, folder = tmp_path / "mine", tmp_path / f"{GATEWAY_FOLDER}x"
    for path in (mine, folder):
        path.mkdir()
        (path / "state.json").write_text("")
    launcher = subprocess.Popen(
        [sys.executable, "-c", GATEWAY.format(server=folder / "state.json")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert launcher.stdout is not None and launcher.stdout.readline() == b"serving\n"
    launcher.kill()
    assert launcher.stdout.read() == b""  # at the gateway's end
    launcher.communicate()
    assert not folder.exists()
    remove_gateway_folder(mine / "state.json")
    remove_gateway_folder(None)
    assert mine.exists()
