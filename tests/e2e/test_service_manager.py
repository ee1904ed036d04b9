"""What `kvforge serve` tells a service manager from its start to its end, engine deaths included."""

import os
import signal
from pathlib import Path

from kvforge.serving.processes.facts import descendants
from tests.e2e.test_operations_restart import tritonserver
from tests.support.serving.notify_socket import NotifySocket
from tests.support.serving.serve_process import FAKE, ServeProcess
from tests.support.serving.server import engine_process


def test_a_service_manager_follows_a_server(engine_dir: Path, tmp_path: Path) -> None:
    with NotifySocket(tmp_path) as listening:
        environment = os.environ | {"NOTIFY_SOCKET": listening.name, "WATCHDOG_USEC": "600000"}
        with ServeProcess(engine_dir, "--drain-timeout", "600", env=environment, program=FAKE) as running:
            assert listening.until("READY=1") == [
                "STATUS=finding the engine, or building it",
                "STATUS=starting the engine and Triton",
                "STATUS=serving",
                "READY=1",
            ]
            assert listening.next() == "WATCHDOG=1"
            for process in descendants(running.pid):
                assert b"NOTIFY_SOCKET" not in Path(f"/proc/{process.pid}/environ").read_bytes()
            os.kill(engine_process(tritonserver(running).pid).pid, signal.SIGKILL)
            told = listening.until("STATUS=serving")
            assert any(message.startswith("STATUS=the engine") for message in told), told
            running.signal(signal.SIGTERM)
            told = listening.until("STATUS=accepted requests have 600 s to finish")
            assert told[-2:] == ["STOPPING=1", "STATUS=accepted requests have 600 s to finish"]
            assert running.wait()[0] == 0
        assert {*listening.waiting()} <= {"WATCHDOG=1"}
