"""Names, IPv6 and all addresses: as the real tritonserver takes them, and the doors of `kvforge serve` there."""

import json
import os
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvforge.common.addresses import find_address
from kvforge.common.errors import KvforgeError
from kvforge.serving.client import StreamingClient
from kvforge.serving.health.probe import has_metrics
from kvforge.serving.server.access import closed_control_apis
from kvforge.serving.server.ports import choose_ports
from kvforge.serving.server.triton_addresses import FRONTENDS, address_arguments, reach
from kvforge.serving.server.triton_install import find_triton
from tests.support.serving.serve_process import FAKE, ServeProcess
from tests.support.serving.server import ask, wait_until

LOOPBACK = {4: "127.0.0.1", 6: "::1"}
TO_NOWHERE = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "grpc_proxy")}
KEY = "a-key-of-this-test"


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("text", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "::"])
def test_tritonserver_listens_where_it_is_told(text: str, tmp_path: Path) -> None:
    """And what "all addresses" is to each of its frontends is what the start says. It serves no model here."""
    try:
        address = find_address(text)
    except KvforgeError:
        pytest.skip(f"this machine has no {text}")
    triton = find_triton()
    ports = choose_ports({name: (address, 0) for name in FRONTENDS})
    (tmp_path / "models").mkdir()
    command = [
        str(triton.binary), f"--model-repository={tmp_path}/models", "--allow-gpu-metrics=false",
        "--pinned-memory-pool-byte-size=0", *address_arguments(dict.fromkeys(FRONTENDS, address)),
        *(f"--{name}-port={port}" for name, port in ports.items()), *closed_control_apis(),
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=triton.environment(), stdout=log, stderr=log)
    try:
        # It listens for questions about metrics last.
        metrics_url = f"http://{address.reached_at.host}:{ports['metrics']}/metrics"
        wait_until(lambda: has_metrics(metrics_url) or process.poll() is not None, "metrics", 60.0)
        found = {
            name: {version for version, host in LOOPBACK.items() if answers(host, ports[name])} for name in FRONTENDS
        }
        assert process.poll() is None, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    own = address.ip.version
    for name, versions in found.items():
        if not address.ip.is_unspecified:
            assert versions == {own}
        elif own == 4:
            assert versions >= {4} and reach(name, address) == (" (IPv6 too)" if 6 in versions else "")
        else:
            assert versions >= {6} and reach(name, address) == ("" if 4 in versions else " (IPv6 alone)")


@pytest.mark.parametrize("address", ["localhost", "::1"])
def test_every_door_answers_at_an_address(engine_dir: Path, address: str) -> None:
    """Whatever proxies the environment names."""
    try:
        host = find_address(address).host
    except KvforgeError:
        pytest.skip(f"this machine has no {address}")
    environment = {**os.environ, **TO_NOWHERE, "KVFORGE_API_KEY": KEY}
    options = ("--openai", "--openai-port", "0", "--served-model-name", "served", "--address", address)
    with ServeProcess(engine_dir, *options, env=environment, program=FAKE) as running:
        assert running.health()[0] == 200 and running.health()[1]["open_without_key"] == []
        for url in (running.http_url, running.metrics_url, running.health_url, running.openai_url):
            assert url.startswith(f"http://{host}:")
        assert running.grpc_url.startswith(f"{host}:") and has_metrics(running.metrics_url)
        with StreamingClient(running.grpc_url) as client:
            assert list(client.generate("ensemble", ask("ensemble", "hello", 2)))
        body = json.dumps({"model": "served", "prompt": "hello", "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{running.openai_url}/completions", body)
        request.add_header("Content-Type", "application/json")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=60)
        request.add_header("Authorization", f"Bearer {KEY}")
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["choices"]
