"""Runs the application: listening socket, limits of connections, and an end that lets open answers finish."""

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn

from kvforge.common.addresses import find_address
from kvforge.gateway.http.app import create_app
from kvforge.gateway.http.auth import ApiKeys
from kvforge.gateway.http.http_protocol import limited_protocol
from kvforge.gateway.http.middleware import Front
from kvforge.gateway.model import ServedModel
from kvforge.gateway.options import GatewayOptions
from kvforge.serving.logs.request_log import configure

logger = logging.getLogger("kvforge.gateway")

BACKLOG = 1024


class GatewayServer(uvicorn.Server):
    """After a signal no new connection is accepted; open answers get `drain_timeout` seconds and then an error.

    `on_ready` is called once requests are answered, after all that is prepared for them.
    """

    def __init__(self, config: uvicorn.Config, front: Front, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._front = front
        self._drain_timeout_s = drain_timeout_s
        self.on_ready: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._front.draining = True
        timer = asyncio.get_running_loop().call_later(self._drain_timeout_s, self._front.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: object) -> None:
        # Not remembered as uvicorn does, which raises the signal again at the end: the exit status is 0.
        self.should_exit = True


def make_server(options: GatewayOptions) -> GatewayServer:
    """A server that is ready to run. Raises KvforgeError for an engine, template or key file that cannot be used, and
    for an address that is not of this machine."""
    keys, address = ApiKeys.read(options.api_key_file), find_address(options.address, "--address")
    model = ServedModel.load(options)
    # kvforge serve, which it ends with, says it itself.
    if not (keys or address.is_loopback or options.exit_with_parent):
        logger.warning("other machines may generate here without a key; give --api-key-file, or let a firewall decide")
    front = create_app(model, options, keys)
    config = uvicorn.Config(
        front,
        http=limited_protocol(options.header_timeout, options.max_connections),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(options.keep_alive),
        # Above the front's own limit, which gives every answer a proper end.
        timeout_graceful_shutdown=int(options.drain_timeout) + 5,
        backlog=BACKLOG,
    )
    return GatewayServer(config, front, options.drain_timeout)


def listen(options: GatewayOptions) -> socket.socket:
    """The listening socket, in which connections wait until the server runs. Raises KvforgeError when the address or
    port cannot be used."""
    sock = find_address(options.address, "--address").listen(options.port, BACKLOG)
    sock.setblocking(False)
    return sock


def run(options: GatewayOptions, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `on_ready` gets the base URL. Raises KvforgeError when it cannot start."""
    configure(options.log_format, options.log_level)
    # Complaints about clients that send no HTTP are of no use here.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = make_server(options)
    sock = listen(options)
    host, port = sock.getsockname()[:2]
    server.on_ready = lambda: on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    server.run(sockets=[sock])
