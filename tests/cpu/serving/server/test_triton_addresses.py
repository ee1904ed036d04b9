"""Addresses on tritonserver's command line, and a server that is started with a wrong one."""

import ipaddress
from pathlib import Path

import pytest

from kvforge.common.addresses import Address
from kvforge.common.errors import KvforgeError
from kvforge.serving.server import launcher
from kvforge.serving.server.launcher import TritonServer
from kvforge.serving.server.options import ServerOptions
from kvforge.serving.server.triton_addresses import FRONTENDS, address_arguments


@pytest.mark.parametrize(
    ("ip", "http", "grpc"),
    [("127.0.0.1", "127.0.0.1", "127.0.0.1"), ("::1", "ipv6:::1", "[::1]"), ("::", "ipv6:::", "[::]")],
)
def test_each_frontend_gets_an_address_as_it_reads_it(ip: str, http: str, grpc: str) -> None:
    assert address_arguments(dict.fromkeys(FRONTENDS, Address(ipaddress.ip_address(ip)))) == [
        f"--http-address={http}", f"--grpc-address={grpc}", f"--metrics-address={http}"
    ]  # fmt: skip


@pytest.mark.parametrize("option", ["address", "http_address", "grpc_address", "metrics_address"])
@pytest.mark.parametrize("value", ["203.0.113.9", ""])
def test_a_wrong_address_is_refused_before_triton_is_looked_for(
    option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Manifest:
        sha256, target = "digest", "cpu"

    monkeypatch.setattr(launcher, "load_manifest", lambda *_: Manifest)
    monkeypatch.delattr(launcher, "find_triton")
    server = TritonServer(tmp_path, ServerOptions(**{option: value}))
    with pytest.raises(KvforgeError, match=r"^address '"):
        server.start()


def test_clients_are_given_addresses_that_they_reach(tmp_path: Path) -> None:
    server = TritonServer(tmp_path)
    server.ports = dict.fromkeys(FRONTENDS, 7)
    server.addresses = dict.fromkeys(FRONTENDS, Address(ipaddress.ip_address("::")))
    assert (server.http_url, server.grpc_url) == ("http://[::1]:7", "[::1]:7")
    server.addresses = dict.fromkeys(FRONTENDS, Address(ipaddress.ip_address("0.0.0.0")))
    assert server.metrics_url == "http://127.0.0.1:7/metrics"
