"""`kvforge serve` with a failure in one stage of its start.

`python -m tests.support.serving.failing_start STAGE NOTE ENGINE OPTIONS...`: the time of the failure goes to the file
NOTE. The engine's process is one that never is ready, so that a start which did not notice would go on for minutes; or
the one that computes nothing, where the failure comes after it.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from kvforge.cli import main
from kvforge.gateway import process as gateway_process
from kvforge.serving.server import launcher
from kvforge.serving.server.triton_install import TritonInstall
from tests.support.serving.fake_server import fake_command

NEVER_READY = [sys.executable, "-c", "import time; time.sleep(3600)"]
SAY = "open({note!r}, 'w').write(str(time.time()))"
IN_A_MODEL = """

import os, threading, time

_initialize = TritonPythonModel.initialize

def _say():
    {say}

def _die():
    _say()
    os.kill(os.getpid(), 9)

def initialize(self, args):
    {does}

TritonPythonModel.initialize = initialize
"""
DOES = {
    "raises": "_say(); import nothing_of_this_name",
    "dies": "_die()",
    "dies-later": "_initialize(self, args); threading.Timer(0.3, _die).start()",
}
AFTER_THE_ENGINE = ("dies-later", "gateway", "port")
"""What comes once an engine is loaded, or nearly."""


def of_models(stage: str, model: str, note: str) -> Callable[..., None]:
    """`materialise`, with a model that does what the stage says."""
    materialise = launcher.materialise

    def spoiled(target: Path, *args: Any) -> None:
        materialise(target, *args)
        file = target / model / ("config.pbtxt" if stage == "unreadable" else "1/model.py")
        say = SAY.format(note=note)
        if stage == "unreadable":
            file.write_text("nothing {")
            Path(note).write_text(str(time.time()))
        else:
            file.write_text(file.read_text() + IN_A_MODEL.format(say=say, does=DOES[stage]))

    return spoiled


def of_the_engine(stage: str, note: str) -> list[str]:
    """The command of an engine process that ends while it loads."""
    end = {"exits": "os._exit(7)", "killed": "os.kill(os.getpid(), 9)"}[stage]
    return [sys.executable, "-c", f"import os, time; {SAY.format(note=note)}; {end}"]


def of_the_server(signum: int, note: str) -> None:
    """From now on tritonservers are ended soon after they have started."""

    def children() -> Iterator[int]:
        for name in Path(f"/proc/{os.getpid()}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended
                yield from map(int, (name / "children").read_text().split())

    def end_each(ended: set[int]) -> None:
        while True:
            time.sleep(0.05)
            for pid in children():
                with contextlib.suppress(OSError):  # a process that has ended
                    if pid not in ended and b"--model-repository" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        time.sleep(0.3)
                        Path(note).write_text(str(time.time()))
                        os.kill(pid, signum)
                        ended.add(pid)

    threading.Thread(target=end_each, args=(set(),), daemon=True).start()


def of_a_port(stage: str, name: str, note: str) -> Callable[..., dict[str, int]]:
    """`choose_ports`, after which another process has the port: one that answers everything, or listens and is silent.

    This process is another than tritonserver, too.
    """
    choose_ports = launcher.choose_ports
    held: list[Any] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    def chosen(*args: Any) -> dict[str, int]:
        ports = choose_ports(*args)
        if not held:
            if stage == "answers":
                held.append(HTTPServer(("127.0.0.1", ports[name]), Answers))
                threading.Thread(target=held[0].serve_forever, daemon=True).start()
            else:
                held.append(socket.create_server(("127.0.0.1", ports[name])))
            Path(note).write_text(str(time.time()))
        return ports

    return chosen


def prepare(stage: str, note: str) -> None:
    """`stage` is KIND or KIND:WHAT."""
    kind, _, what = stage.partition(":")
    command = NEVER_READY
    if kind in (*DOES, "unreadable"):
        launcher.materialise = of_models(kind, what, note)
    elif kind == "engine":
        command = ["/nowhere"] if what == "absent" else of_the_engine(what, note)
    elif kind == "server" and what == "exits":
        launcher.find_triton = lambda: TritonInstall(Path("/bin/false"))
    elif kind == "server":
        of_the_server(signal.Signals[what], note)
    elif kind == "gateway":
        end = {"exits": "sys.exit('kvforge: no room')", "killed": "os.kill(os.getpid(), 9)"}[what]
        program = f"import os, sys, time; {SAY.format(note=note)}; {end}"
        gateway_process.gateway_command = lambda options: [sys.executable, "-c", program]
    elif kind == "port":
        launcher.choose_ports = of_a_port(*what.split("-"), note)
    launcher.engine_command = fake_command if kind in AFTER_THE_ENGINE else lambda *args: command


if __name__ == "__main__":
    prepare(*sys.argv[1:3])
    sys.exit(main(["serve", *sys.argv[3:]]))
