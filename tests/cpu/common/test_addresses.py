"""What may be listened on: names, IPv4, IPv6 and all addresses; others are refused in a sentence on the address."""

import contextlib
import ipaddress
import socket
from collections.abc import Callable

import pytest

from kvforge.common import addresses
from kvforge.common.addresses import Address, find_address
from kvforge.common.errors import KvforgeError

try:
    find_address("::1")
    has_ipv6 = True
except KvforgeError:
    has_ipv6 = False
ipv6 = pytest.mark.skipif(not has_ipv6, reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("text", "host", "reached", "is_loopback"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.2", "127.0.0.2", True),
        ("0.0.0.0", "0.0.0.0", "127.0.0.1", False),
        pytest.param("::1", "[::1]", "[::1]", True, marks=ipv6),
        pytest.param("[::1]", "[::1]", "[::1]", True, marks=ipv6),
        pytest.param("0:0:0:0:0:0:0:1", "[::1]", "[::1]", True, marks=ipv6),
        pytest.param("::", "[::]", "[::1]", False, marks=ipv6),
        ("::ffff:127.0.0.1", "127.0.0.1", "127.0.0.1", True),
    ],
)
def test_numbers(text: str, host: str, reached: str, is_loopback: bool) -> None:
    found = find_address(text)
    assert (found.host, found.reached_at.host, found.is_loopback) == (host, reached, is_loopback)
    assert find_address(str(found.ip)) == found
    with found.listen(0) as sock, contextlib.closing(socket.socket(found.reached_at.family)) as client:
        client.connect((str(found.reached_at.ip), sock.getsockname()[1]))


@pytest.fixture
def resolves(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets every name stand for the addresses given."""

    def resolve(*found: str) -> None:
        places = [(socket.AF_INET6 if ":" in ip else socket.AF_INET, 1, 6, "", (ip, 0)) for ip in found]
        monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *args, **kwargs: places)

    return resolve


def test_localhost_is_loopback() -> None:
    assert find_address("localhost").is_loopback


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        (("127.0.0.1",), "127.0.0.1"),
        (("::1", "127.0.0.1"), "127.0.0.1"),
        (("192.0.2.77", "127.0.0.3", "127.0.0.2"), "127.0.0.3"),
        pytest.param(("::1",), "::1", marks=ipv6),
        pytest.param(("203.0.113.9", "2001:db8::9", "::1"), "::1", marks=ipv6),
    ],
)
def test_of_a_names_addresses_the_first_one_of_this_machine_is_taken(
    resolves: Callable[..., None], found: tuple[str, ...], chosen: str
) -> None:
    resolves(*found)
    assert str(find_address("name").ip) == chosen


@pytest.mark.parametrize("text", ["nohost.invalid", "", " ", "localhost:8000", "http://localhost", "a..b", "1.2.3.4.5"])
def test_what_is_no_address_does_not_resolve(text: str) -> None:
    says = r"^--http-address '.*' does not resolve to an address \(.*\); give an address"
    with pytest.raises(KvforgeError, match=says) as caught:
        find_address(text, "--http-address")
    assert "port" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["203.0.113.9", "2001:db8::9", "224.0.0.1", "255.255.255.255"])
def test_addresses_of_other_machines_are_refused(text: str) -> None:
    with pytest.raises(KvforgeError, match=r"is not an address of this machine \(.*\); give an address") as caught:
        find_address(text, "--address")
    assert "port" not in str(caught.value)


def test_a_name_of_another_machine_is_refused_with_its_address(resolves: Callable[..., None]) -> None:
    resolves("203.0.113.9")
    with pytest.raises(KvforgeError, match=r"^--address 'name' is not .* \(203\.0\.113\.9: "):
        find_address("name", "--address")


def test_link_local_addresses_are_refused(resolves: Callable[..., None]) -> None:
    """Triton would listen on all addresses instead."""
    resolves("fe80::1")
    with pytest.raises(KvforgeError, match=r"^--address 'fe80::1%eth0' is a link-local address"):
        find_address("fe80::1%eth0", "--address")


@ipv6
def test_all_addresses_are_ipv4_and_ipv6() -> None:
    with Address(ipaddress.ip_address("::")).listen(0) as sock:
        port = sock.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=5).close()


@pytest.mark.parametrize("port", [-1, 65536])
def test_impossible_ports_are_refused(port: int) -> None:
    with pytest.raises(KvforgeError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*; choose another port, or 0"):
        find_address("127.0.0.1").listen(port)
