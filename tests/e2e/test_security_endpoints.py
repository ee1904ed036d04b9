"""What a client, another user of the machine and a list of processes can reach of a running server."""

import http.client
import json
import socket
import stat
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from kvforge.serving.health.probe import is_ready
from kvforge.serving.processes.facts import descendants
from kvforge.serving.server.access import OPENED_BY
from kvforge.serving.server.launcher import TritonServer
from tests.support.serving.server import ask, text_of

LISTEN = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def test_only_loopback_listens(server: TritonServer) -> None:
    """All sockets of all processes, not only the ports that were asked for."""
    addresses = set()
    for pid in [server.pid, *(process.pid for process in descendants(server.pid))]:
        inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if f"socket:[{fields[9]}]" in inodes and (fields[3] == LISTEN or table.startswith("udp")):
                    addresses.add(fields[1].split(":")[0])
    assert addresses
    assert addresses <= LOOPBACK


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "systemsharedmemory/status"),
        ("POST", "systemsharedmemory/region/a/register"),
        ("GET", "cudasharedmemory/status"),
        ("POST", "repository/index"),
        ("POST", "repository/models/ensemble/unload"),
        ("POST", "repository/models/evil/load"),
        ("GET", "logging"),
        ("POST", "logging"),
        ("POST", "trace/setting"),
        ("POST", "models/ensemble/trace/setting"),
    ],
)
def test_control_endpoints_are_closed_over_http(server: TritonServer, method: str, path: str) -> None:
    body = json.dumps({"key": "/a", "byte_size": 1, "log_file": "/dev/null", "trace_file": "/dev/null"}).encode()
    headers = {OPENED_BY: control_key(server).split("\n")[0]}
    request = urllib.request.Request(
        f"{server.http_url}/v2/{path}", data=body if method == "POST" else None, method=method, headers=headers
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    with caught.value as answer:
        assert answer.code == 403
        told = answer.read().decode()
        assert "restricted" in told and "kvforge serve --control-apis" in told


def test_control_endpoints_are_closed_over_grpc(server: TritonServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        calls = [
            client.get_system_shared_memory_status,
            lambda: client.register_system_shared_memory("a", "/a", 1),
            client.get_cuda_shared_memory_status,
            client.get_model_repository_index,
            lambda: client.load_model("evil", config="{}", files={"file:1/model.py": b"raise SystemExit"}),
            lambda: client.unload_model("ensemble"),
            client.get_log_settings,
            lambda: client.update_log_settings({"log_file": "/dev/null"}),
            lambda: client.update_trace_settings(settings={"trace_file": "/dev/null"}),
        ]
        for call in calls:
            with pytest.raises(InferenceServerException, match=r"restricted.*kvforge serve --control-apis"):
                call()
        assert client.get_inference_statistics("ensemble").model_stats  # load generators read these


def control_key(server: TritonServer) -> str:
    """What another user reads from the list of processes."""
    words = Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
    (option,) = [word for word in words if word.startswith("--http-restricted-api=")]
    return option.rpartition("=")[2]


@pytest.mark.parametrize("separator", ["\n", "\r\n", "\n ", "\r\n\t", "", "\\n", "%0a"])
def test_the_control_key_fits_no_header(server: TritonServer, separator: str) -> None:
    head, tail = control_key(server).split("\n")
    request = f"GET /v2/logging HTTP/1.1\r\nHost: a\r\n{OPENED_BY}: {head}{separator}{tail}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.ports["http"]), timeout=30) as connection:
        connection.sendall(request.encode())
        assert not connection.recv(100).startswith(b"HTTP/1.1 200")


def run_dir_of(server: TritonServer) -> Path:
    words = Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
    (option,) = [word for word in words if word.startswith("--model-repository=")]
    return Path(option.partition("=")[2]).parent


def test_files_are_private(server: TritonServer) -> None:
    """Prompts and answers pass through /dev/shm and sockets: nothing of that is another user's to open."""
    assert text_of(server, ask("ensemble", "hello", 2))
    run_dir = run_dir_of(server)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    regions = list(Path("/dev/shm").glob(f"{server.shm_prefix}*"))
    assert regions
    for path in [*regions, *(path for path in run_dir.iterdir() if not path.is_dir())]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.parametrize(
    "name", ["..", "../ensemble", "..%2fensemble", "%2e%2e%2f%2e%2e%2fetc", "ensemble%00", "/etc/passwd", "a" * 5000]
)
def test_model_names_are_no_paths(server: TritonServer, name: str) -> None:
    """Each is refused; Triton's HTTP server may drop a request of thousands of characters without an answer."""
    for end in ("config", "generate", "infer", "ready"):
        connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=30)
        connection.request("POST" if end in ("generate", "infer") else "GET", f"/v2/models/{name}/{end}", body=b"{}")
        try:
            response = connection.getresponse()
            assert 400 <= response.status < 500, (end, response.read())
        except http.client.RemoteDisconnected:
            assert len(name) > 1000
        connection.close()
    assert is_ready(server.http_url)
