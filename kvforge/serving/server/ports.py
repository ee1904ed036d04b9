"""Checks ports before Triton starts: it refuses port 0, and reports a taken one only after loading."""

import socket
from contextlib import ExitStack

from kvforge.common.errors import KvforgeError


def choose_ports(address: str, wanted: dict[str, int]) -> dict[str, int]:
    """One port per name; 0 means any free one. Raises KvforgeError, naming the option, when one is taken."""
    chosen: dict[str, int] = {}
    with ExitStack() as stack:
        for name, port in sorted(wanted.items(), key=lambda item: item[1] == 0):
            # All sockets stay open until the end, so that no two names get the same free port.
            sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((address, port))
                sock.listen()
            except (OSError, OverflowError) as error:
                raise KvforgeError(
                    f"cannot listen on {address}:{port} ({error.strerror if isinstance(error, OSError) else error}); "
                    f"choose another with --{name}-port, or 0 for any free port"
                ) from None
            chosen[name] = sock.getsockname()[1]
    return chosen
