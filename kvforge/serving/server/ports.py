"""Checks ports before Triton starts: it refuses port 0, and reports a taken one only after loading."""

from collections.abc import Mapping
from contextlib import ExitStack

from kvforge.common.addresses import Address
from kvforge.common.errors import KvforgeError

PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002, "health": 8003, "openai": 8080}
"""What each door of a server is called in options, and its port unless told otherwise."""


def choose_ports(wanted: Mapping[str, tuple[Address, int]]) -> dict[str, int]:
    """One port for each name, on its address; 0 means any free one. Raises KvforgeError, naming the option, when one
    is taken."""
    first: dict[tuple[str, int], str] = {}
    for name, (address, port) in wanted.items():
        if port and (other := first.setdefault((str(address.ip), port), name)) != name:
            raise KvforgeError(f"--{other}-port and --{name}-port are both {port}; give different ones")
    chosen: dict[str, int] = {}
    with ExitStack() as stack:
        for name, (address, port) in sorted(wanted.items(), key=lambda item: item[1][1] == 0):
            # All sockets stay open until the end, so that no two names get the same free port.
            sock = stack.enter_context(address.listen(port, remedy=f"choose another with --{name}-port"))
            chosen[name] = sock.getsockname()[1]
    return chosen
