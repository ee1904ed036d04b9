"""A gateway in front of a running server, for as long as a `with` block."""

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvforge.errors import KvforgeError
from kvforge.gateway import GatewayOptions, gateway_command
from kvforge.serving.launcher import TritonServer
from kvforge.serving.ports import choose_ports

CHAT_TEMPLATE = Path(__file__).resolve().parents[1] / "aiperf" / "plain_chat.jinja"
"""For models without a template of their own, as the tiny ones are: the messages, one a line."""
START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Gateway:
    """Where it listens, the model's name there, and its process."""

    url: str
    model: str
    pid: int


@contextlib.contextmanager
def run_gateway(server: TritonServer, log: Path | None = None) -> Iterator[Gateway]:
    """Start a gateway for ``server``'s engine on a free port. Raises KvforgeError when it does not come up."""
    address = server.options.address
    port = choose_ports(address, {"openai": 0})["openai"]
    options = GatewayOptions(
        engine=server.engine_dir, grpc=server.grpc_url, address=address, port=port,
        chat_template=CHAT_TEMPLATE, exit_with_parent=True,
    )  # fmt: skip
    out = log.open("ab") if log else subprocess.DEVNULL
    process = subprocess.Popen(gateway_command(options), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        url = f"http://{address}:{port}"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"{url}/v1/models"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise KvforgeError("the gateway did not start; run python -m kvforge.gateway by hand to see why.")
            time.sleep(0.1)
        yield Gateway(url, server.engine_dir.name, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            print("the gateway did not end in 10 s and is killed", file=sys.stderr)
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return response.status == 200
    except OSError:
        return False
