"""What a server is started with."""

from dataclasses import dataclass
from pathlib import Path

from kvforge.common.addresses import LOOPBACK
from kvforge.serving.options import ModelOptions


@dataclass(frozen=True)
class ServerOptions(ModelOptions):
    """Ports of 0 mean any free one; an address of None is `address`. `drain_timeout_s` is how long `stop` lets accepted
    requests run on; without `decoupled` each request has one response and may not stream; with `exclude_input` (None:
    as `decoupled`) an answer leaves the prompt out where a request does not say; `control_apis` leaves Triton's control
    endpoints (access.py) open; `log_file` None keeps the log in the run directory, which goes with the server."""

    address: str = LOOPBACK
    http_address: str | None = None
    grpc_address: str | None = None
    metrics_address: str | None = None
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    drain_timeout_s: float = 0.0
    decoupled: bool = True
    exclude_input: bool | None = None
    control_apis: bool = False
    log_file: Path | None = None

    def address_of(self, frontend: str) -> str:
        """Where Triton's ``frontend`` (triton_addresses.py) listens."""
        own = getattr(self, f"{frontend}_address")
        return self.address if own is None else own


@dataclass(frozen=True)
class RestartPolicy:
    """How often a server is started again: at most `max_restarts` times within `window_s` seconds; 0 is never."""

    max_restarts: int = 5
    window_s: float = 300.0
