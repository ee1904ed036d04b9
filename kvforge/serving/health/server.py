"""The health endpoint of `kvforge serve`: GET /live and GET /ready, 200 or 503, with the reasons as JSON.

Triton's own /v2/health/ready stays 200 while a model's process is dead and while the engine loads again.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvforge.common.addresses import find_address

REQUEST_TIMEOUT_S = 10.0
ACCEPT_PAUSE_S = 0.1
BACKLOG = 128
"""With Python's 5 a burst of probes waits a second for TCP to try again."""


class HealthServer:
    """Answers from `report`, which returns {"live": bool, "ready": bool, "reasons": [...], ...}.

    Raises KvforgeError when it cannot listen there. `report` runs on the thread of a request.
    """

    def __init__(self, address: str, port: int, report: Callable[[], dict[str, Any]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_TIMEOUT_S
            server_version = "kvforge"
            sys_version = ""

            def do_GET(self) -> None:
                question = self.path.partition("?")[0].strip("/")
                if question not in ("live", "ready"):
                    self._answer(404, {"error": "ask for /live or /ready"})
                    return
                answer = report()
                self._answer(200 if answer[question] else 503, answer)

            def _answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode() + b"\n"
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Probes are not worth a line each."""

        place = find_address(address, "--health-address")
        self._server = _Server(place.listen(port, BACKLOG, remedy="choose another with --health-port"), Handler)
        self.port = int(self._server.server_address[1])
        self.url = f"http://{place.host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, sock: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        """`sock` listens already."""
        super().__init__(sock.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock

    def get_request(self) -> tuple[socket.socket, Any]:
        """Without a free file descriptor the connection waits, and this thread does not spin meanwhile."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_PAUSE_S)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A probe that went away is no event."""
