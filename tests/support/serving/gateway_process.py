"""The OpenAI gateway in a process of its own, in front of a running server."""

import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.common.addresses import find_address
from kvforge.gateway import gateway_command
from kvforge.gateway.options import GatewayOptions
from kvforge.serving.server.launcher import TritonServer
from kvforge.serving.server.ports import choose_ports

MODEL = "tiny"


@dataclass(frozen=True)
class Gateway:
    url: str
    port: int
    pid: int
    log: Path


@contextmanager
def run_gateway(server: TritonServer, folder: Path, **more: Any) -> Iterator[Gateway]:
    """Gives it when it answers; `folder` gets its log, `more` are options. It has ended afterwards."""
    port = choose_ports({"openai": (find_address("127.0.0.1"), 0)})["openai"]
    options = GatewayOptions(engine=server.engine_dir, grpc=server.grpc_url, port=port, model_names=(MODEL,), **more)
    log = folder / "gateway.log"
    with log.open("wb") as sink, subprocess.Popen(gateway_command(options), stdout=sink, stderr=sink) as process:
        try:
            gateway = Gateway(f"http://127.0.0.1:{port}", port, process.pid, log)
            _wait(gateway, process)
            yield gateway
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            process.wait(timeout=120)


def _wait(gateway: Gateway, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 180
    while True:
        try:
            with urllib.request.urlopen(f"{gateway.url}/health", timeout=5) as response:
                assert response.status == 200
                return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, gateway.log.read_text()
            time.sleep(0.05)
