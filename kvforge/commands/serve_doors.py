"""The doors of `kvforge serve`: where each one listens, and which of them serve whoever reaches them."""

import argparse
from dataclasses import dataclass

from kvforge.common.addresses import LOOPBACK, Address, find_address
from kvforge.serving.server.ports import PORTS, choose_ports
from kvforge.serving.server.triton_addresses import FRONTENDS, reach

NAMES = {"http": "HTTP", "grpc": "gRPC", "metrics": "metrics", "health": "health", "openai": "OpenAI"}
URLS = {
    "http": "http://{}", "grpc": "{}", "metrics": "http://{}/metrics", "health": "http://{}/ready",
    "openai": "http://{}/v1",
}  # fmt: skip
GENERATING = ("http", "grpc", "openai")
"""Doors whose clients generate; of the others they read."""


def add_door_options(parser: argparse.ArgumentParser) -> None:
    """Declare --address and, for each door, --NAME-address and --NAME-port."""
    group = parser.add_argument_group("addresses and ports", "where Triton, health and the OpenAI API listen")
    group.add_argument(
        "--address", default=LOOPBACK, metavar="ADDRESS",
        help="of every door without one of its own: an address or name of this machine, 0.0.0.0 or :: for all",
    )  # fmt: skip
    for name, port in PORTS.items():
        default = "--address, or loopback where the API has a key" if name in FRONTENDS else "--address"
        group.add_argument(
            f"--{name}-address", metavar="ADDRESS", help=f"where {NAMES[name]} listens (default: {default})"
        )
        group.add_argument(f"--{name}-port", type=int, default=port, help=f"0: any free one (default: {port})")


@dataclass(frozen=True)
class Doors:
    """The address of each door, and its port, 0 for any free one. `has_key`: clients of the gateway need a key."""

    addresses: dict[str, Address]
    ports: dict[str, int]
    has_key: bool

    def check_ports(self) -> None:
        """Raise KvforgeError, naming the option, when a port is not free."""
        choose_ports({name: (address, self.ports[name]) for name, address in self.addresses.items()})

    def ip(self, name: str) -> str:
        return str(self.addresses[name].ip)

    @property
    def open_without_key(self) -> list[str]:
        """Doors at which other machines generate without a key."""
        return [
            name
            for name, address in self.addresses.items()
            if name in GENERATING and not address.is_loopback and not (name == "openai" and self.has_key)
        ]

    def listening(self, ports: dict[str, int]) -> list[str]:
        """Say what listens where, on these ports: a line each, what people ask first."""
        return [
            f"{NAMES[name]} {URLS[name].format(f'{address.host}:{ports[name]}')}{self._remark(name)}"
            for name, address in sorted(self.addresses.items(), key=lambda item: item[0] != "openai")
        ]

    def page(self, port: int) -> str:
        """Return where a browser of this machine finds the gateway's page, on this port."""
        return f"http://{self.addresses['openai'].reached_at.host}:{port}/"

    def warning(self) -> str | None:
        """Say in one line where other machines generate without a key, or None."""
        if not self.open_without_key:
            return None
        return (
            f"{', '.join(NAMES[name] for name in self.open_without_key)}: other machines may generate here without a "
            "key; protect OpenAI with --api-key-file and keep Triton's ports on loopback, or let a firewall decide"
        )

    def _remark(self, name: str) -> str:
        if name == "openai" and self.has_key:
            return " (with a key)"
        return reach(name, self.addresses[name])


def choose_doors(args: argparse.Namespace, has_key: bool) -> Doors:
    """Where the doors are that the command line asks for. Raises KvforgeError for an address that is not of this
    machine."""
    default = find_address(args.address, "--address")
    addresses = {}
    for name in PORTS:
        own = getattr(args, f"{name}_address")
        if name == "openai" and not args.openai:
            continue
        if own is not None:
            addresses[name] = find_address(own, f"--{name}-address")
        elif has_key and name in FRONTENDS and not default.is_loopback:
            addresses[name] = find_address(LOOPBACK)
        else:
            addresses[name] = default
    return Doors(addresses, {name: getattr(args, f"{name}_port") for name in addresses}, has_key)
