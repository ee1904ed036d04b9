"""Which of Triton's endpoints clients reach: inference, health, metadata and statistics, not the control ones."""

import contextlib
import secrets
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
CONTROL_APIS = ("shared-memory", "model-repository", "logging", "trace")
"""Whoever may register a region of /dev/shm reads and writes it, the stubs' own included; the trace and logging
endpoints write to any file that tritonserver may write to; the repository's load and unload models."""
OPENED_BY = "kvforge serve --control-apis"
PRIVATE_UMASK = 0o077
"""For tritonserver and its stubs: their sockets and files are not for other users."""


def closed_control_apis() -> list[str]:
    """Arguments of tritonserver that close CONTROL_APIS, over HTTP and gRPC, to everybody.

    Triton cannot switch them off, it asks for a header with a value. This value is random and holds a line break,
    which no header can carry, so that reading it in the list of processes opens nothing. The header's name, which
    Triton's refusal quotes, says to who runs the server how to open them.
    """
    key = f"{OPENED_BY}={secrets.token_hex(16)}\n{secrets.token_hex(16)}"
    return [
        f"--{option}={','.join(CONTROL_APIS)}:{key}" for option in ("http-restricted-api", "grpc-restricted-protocol")
    ]


def make_regions_private(prefix: str) -> None:
    """Take the regions in /dev/shm whose names begin with `prefix` from other users: all tensors pass through them,
    and Triton's Python backend makes them readable for everybody, whatever the umask. Called before the first
    client is let in."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):
            region.chmod(0o600)
