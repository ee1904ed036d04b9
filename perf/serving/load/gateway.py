"""A gateway in front of a running server, for as long as a `with` block."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvforge.gateway import GatewayOptions
from kvforge.gateway.http.process import GatewayProcess
from kvforge.serving.logs.pump import LogSink
from kvforge.serving.server.launcher import TritonServer

CHAT_TEMPLATE = Path(__file__).resolve().parents[1] / "aiperf" / "plain_chat.jinja"
"""For models without a template of their own, as the tiny ones are: the messages, one a line."""


@dataclass(frozen=True)
class Gateway:
    """Where it listens, the model's name there, and its process."""

    url: str
    model: str
    pid: int


@contextlib.contextmanager
def run_gateway(server: TritonServer, log: Path | None = None) -> Iterator[Gateway]:
    """Start a gateway for ``server``'s engine on a free port. Raises KvforgeError when it does not come up."""
    sink = LogSink(log)
    options = GatewayOptions(
        engine=server.engine_dir, grpc=server.grpc_url, address=server.options.address, port=0,
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
    process = GatewayProcess(options, sink)
    try:
        process.start(server, cancelled=lambda: False)
        yield Gateway(process.url.removesuffix("/v1"), server.engine_dir.name, process.pid)
    finally:
        process.drain()
        process.stop()
        sink.close()
