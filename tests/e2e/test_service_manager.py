"""What `kvforge serve` tells a service manager from its start to its end, the death of its engine included."""

import os
import signal
from pathlib import Path

from kvforge.serving.processes.facts import descendants
from tests.e2e.test_operations_restart import tritonserver
from tests.support.serving.notify_socket import listening
from tests.support.serving.serve_process import FAKE, ServeProcess
from tests.support.serving.server import engine_process


def test_a_service_manager_follows_a_server(engine_dir: Path, tmp_path: Path) -> None:
    with listening(tmp_path) as end:
        environment = os.environ | {"NOTIFY_SOCKET": end.name, "WATCHDOG_USEC": "600000"}
        with ServeProcess(engine_dir, "--drain-timeout", "600", env=environment, program=FAKE) as running:
            stages = ["finding the engine, or building it", "starting the engine and Triton", "serving"]
            assert end.until("READY=1") == [f"STATUS={stage}" for stage in stages] + ["READY=1"]
            end.until("WATCHDOG=1")
            for process in descendants(running.pid):
                assert b"NOTIFY_SOCKET" not in Path(f"/proc/{process.pid}/environ").read_bytes()
            os.kill(engine_process(tritonserver(running).pid).pid, signal.SIGKILL)
            assert any(message.startswith("STATUS=the engine") for message in end.until("STATUS=serving"))
            running.signal(signal.SIGTERM)
            assert end.until("STATUS=accepted requests have 600 s to finish")[-2] == "STOPPING=1"
            assert running.wait()[0] == 0
