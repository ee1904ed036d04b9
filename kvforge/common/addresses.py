"""Addresses of this machine that a server listens on: what a name stands for, whether the machine has it, a socket."""

import ipaddress
import socket
from dataclasses import dataclass

from kvforge.common.errors import KvforgeError

LOOPBACK = "127.0.0.1"
WHICH = f"give an address or name of this machine, {LOOPBACK} for loopback, or 0.0.0.0 or :: for all its addresses"
REACHED_WITHIN_S = 2.0


@dataclass(frozen=True)
class Address:
    """One IP address of this machine, or all: 0.0.0.0 is every IPv4 address, :: every IPv6 and IPv4 address."""

    ip: ipaddress.IPv4Address | ipaddress.IPv6Address

    @property
    def is_loopback(self) -> bool:
        """Whether this machine alone reaches it."""
        return self.ip.is_loopback

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET if self.ip.version == 4 else socket.AF_INET6

    @property
    def host(self) -> str:
        """As it stands before a port: 127.0.0.1, [::1]."""
        return str(self.ip) if self.ip.version == 4 else f"[{self.ip}]"

    @property
    def reached_at(self) -> "Address":
        """Where a client on this machine reaches it: loopback where it is all addresses."""
        if not self.ip.is_unspecified:
            return self
        return Address(ipaddress.ip_address(LOOPBACK if self.ip.version == 4 else "::1"))

    def listen(self, port: int, backlog: int = 128, *, remedy: str = "choose another port") -> socket.socket:
        """A listening socket; port 0 is any free one. Raises KvforgeError, which ends with what to do instead, where
        the port is not free."""
        # With the protocol named, asyncio turns off Nagle's algorithm on its connections, which costs 40 ms an answer.
        sock = socket.socket(self.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self.ip.version == 6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if self.ip.is_unspecified else 1)
            sock.bind((str(self.ip), port))
            sock.listen(backlog)
        except (OSError, OverflowError) as error:
            sock.close()
            why = error.strerror if isinstance(error, OSError) else error
            raise KvforgeError(
                f"cannot listen on {self.host}:{port} ({why}); {remedy}, or 0 for any free port"
            ) from None
        return sock


def find_address(text: str, option: str = "address") -> Address:
    """The address of this machine that ``text`` names: an IP address, in brackets or not, or a name, whose IPv4
    addresses are tried first. Raises KvforgeError, naming the option, where there is none."""
    reason = "it has none"
    for address in _resolve(text, option):
        if address.ip.version == 6 and address.ip.is_link_local:
            raise KvforgeError(f"{option} {text!r} is a link-local address, which no server listens on here; {WHICH}")
        problem = _problem(address)
        if problem is None:
            return address
        reason = f"{address.ip}: {problem}" if str(address.ip) != text else problem
    raise KvforgeError(f"{option} {text!r} is not an address of this machine ({reason}); {WHICH}")


def _resolve(text: str, option: str) -> list[Address]:
    name = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        # An empty name would be resolved to loopback.
        found = socket.getaddrinfo(name or " ", 0, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no host name"
        raise KvforgeError(f"{option} {text!r} does not resolve to an address ({why}); {WHICH}") from None
    ips = [ipaddress.ip_address(place[0]) for *_, place in found]
    # An IPv4 address written as an IPv6 one is listened on as what it is.
    ips = [getattr(ip, "ipv4_mapped", None) or ip for ip in ips]
    return [Address(ip) for ip in sorted(dict.fromkeys(ips), key=lambda ip: ip.version)]


def _problem(address: Address) -> str | None:
    """Why nothing can listen on an address, on any port, and be reached there from this machine; or None."""
    try:
        with socket.socket(address.family) as server, socket.socket(address.family) as client:
            server.bind((str(address.ip), 0))
            server.listen()
            client.settimeout(REACHED_WITHIN_S)
            client.connect((str(address.reached_at.ip), server.getsockname()[1]))
            return None
    except OSError as error:
        return error.strerror or str(error)
