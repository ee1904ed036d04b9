"""Addresses as tritonserver takes them.

Its HTTP and metrics servers know numbers alone, IPv6 behind the prefix `ipv6:`; of a name they make 255.255.255.255 and
are never reached. Its gRPC server wants IPv6 in brackets.
"""

from collections.abc import Mapping

from kvforge.common.addresses import Address

FRONTENDS = ("http", "grpc", "metrics")


def address_arguments(addresses: Mapping[str, Address]) -> list[str]:
    """Arguments of tritonserver that make each frontend listen on its address."""
    return [f"--{name}-address={_as_taken(name, addresses[name])}" for name in FRONTENDS]


def _as_taken(name: str, address: Address) -> str:
    if name == "grpc" or address.ip.version == 4:
        return address.host
    return f"ipv6:{address.ip}"


def reach(name: str, address: Address) -> str:
    """Words behind a door's address where tritonserver gives "all addresses" another meaning; otherwise none."""
    if not address.ip.is_unspecified:
        return ""
    if name == "grpc":
        return " (IPv6 too)" if address.ip.version == 4 else ""
    return " (IPv6 alone)" if name in FRONTENDS and address.ip.version == 6 else ""
