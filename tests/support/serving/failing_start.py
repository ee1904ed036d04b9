"""`kvforge serve` with a failure in one stage of its start.

`python -m tests.support.serving.failing_start STAGE ENGINE OPTIONS...`: the engine's process is one that never is
ready, or the one that computes nothing, where the failure comes after it. Nothing is given up here: a start that ends
has noticed the failure, and found the end of what it waits for.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from kvforge.cli import main
from kvforge.gateway.http import process as gateway_process
from kvforge.serving.processes.facts import children, descendants
from kvforge.serving.server import launcher
from kvforge.serving.server.triton_install import TritonInstall
from tests.support.serving.fake_server import fake_command

NEVER_READY = [sys.executable, "-c", "import time; time.sleep(3600)"]
GIVES_UP_AFTER = ("START_TIMEOUT_S", "READY_FOLLOWS_S", "END_TIMEOUT_S", "LOG_TIMEOUT_S")
"""The launcher's times."""
IN_A_MODEL = """

import os, threading

_initialize = TritonPythonModel.initialize

def _die():
    os.kill(os.getpid(), 9)

def initialize(self, args):
    {does}

TritonPythonModel.initialize = initialize
"""
DOES = {
    "raises": "import nothing_of_this_name",
    "dies": "_die()",
    "dies-later": "_initialize(self, args); threading.Timer(0.3, _die).start()",
}
AFTER_THE_ENGINE = ("dies-later", "gateway", "port")
"""What comes once an engine is loaded, or nearly."""


def of_models(stage: str, model: str) -> Callable[..., None]:
    """`materialise`, with a model that does what the stage says."""
    materialise = launcher.materialise

    def spoiled(target: Path, *args: Any) -> None:
        materialise(target, *args)
        file = target / model / ("config.pbtxt" if stage == "unreadable" else "1/model.py")
        if stage == "unreadable":
            file.write_text("nothing {")
        else:
            file.write_text(file.read_text() + IN_A_MODEL.format(does=DOES[stage]))

    return spoiled


def of_the_engine(stage: str) -> list[str]:
    """The command of an engine process that ends while it loads."""
    end = {"exits": "os._exit(7)", "killed": "os.kill(os.getpid(), 9)"}[stage]
    return [sys.executable, "-c", f"import os; {end}"]


def of_the_server(signum: int) -> None:
    """From now on tritonservers are ended as soon as they have an engine's process, which has their log open."""

    def end_each() -> None:
        while True:
            time.sleep(0.05)
            with contextlib.suppress(OSError):  # a process that has ended meanwhile
                for child in children(os.getpid()):
                    words = [Path(f"/proc/{one.pid}/cmdline").read_bytes() for one in descendants(child.pid)]
                    if any(NEVER_READY[-1].encode() in line for line in words):
                        os.kill(child.pid, signum)

    threading.Thread(target=end_each, daemon=True).start()


def of_a_port(stage: str, name: str) -> Callable[..., dict[str, int]]:
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
        return ports

    return chosen


def prepare(stage: str) -> None:
    """`stage` is KIND or KIND:WHAT."""
    for name in GIVES_UP_AFTER:
        setattr(launcher, name, 3600.0)
    kind, _, what = stage.partition(":")
    command = NEVER_READY
    if kind in (*DOES, "unreadable"):
        launcher.materialise = of_models(kind, what)
    elif kind == "engine":
        command = ["/nowhere"] if what == "absent" else of_the_engine(what)
    elif kind == "server" and what == "exits":
        launcher.find_triton = lambda: TritonInstall(Path("/bin/false"))
    elif kind == "server":
        of_the_server(signal.Signals[what])
    elif kind == "gateway":
        end = {"exits": "sys.exit('kvforge: no room')", "killed": "os.kill(os.getpid(), 9)"}[what]
        program = f"import os, sys; {end}"
        gateway_process.gateway_command = lambda options: [sys.executable, "-c", program]
    elif kind == "port":
        launcher.choose_ports = of_a_port(*what.split("-"))
    launcher.process_command = fake_command if kind in AFTER_THE_ENGINE else lambda *args: command


if __name__ == "__main__":
    prepare(sys.argv[1])
    sys.exit(main(["serve", *sys.argv[2:]]))
