"""The example of nginx before the gateway, with nginx itself: TLS, streams as they come, a replica that is away."""

import http.client
import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cpu.gateway.fake_triton import FakeTriton
from tests.cpu.gateway.http_calls import COMPLETION, WAIT_S, endless, wait_until
from tests.support.deployment_examples import EXAMPLES

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
pytestmark = pytest.mark.skipif(NGINX is None or shutil.which("openssl") is None, reason="needs nginx and openssl")


@pytest.fixture
def front(url: str, tmp_path: Path) -> Iterator[http.client.HTTPSConnection]:
    """A connection to nginx, whose second replica is away.

    Both ports stay bound while nginx runs, so that no server of another test can come to either: a socket that is bound
    alone refuses connections, and with SO_REUSEPORT it lets nginx listen beside it.
    """
    names = [tmp_path / "key.pem", tmp_path / "cert.pem"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", names[0], "-out", names[1]], check=True, capture_output=True)
    held = [socket.socket() for _ in range(2)]
    held[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    for sock in held:
        sock.bind(("127.0.0.1", 0))
    port, away = (sock.getsockname()[1] for sock in held)
    text = (EXAMPLES / "nginx.conf").read_text()
    for was, now in (
        ("/etc/kvforge/tls", str(tmp_path)), ("127.0.0.1:8080", f"127.0.0.1:{urlsplit(url).port}"),
        ("127.0.0.1:8081", f"127.0.0.1:{away}"), ("listen 443", f"listen 127.0.0.1:{port} reuseport"),
    ):  # fmt: skip
        assert was in text
        text = text.replace(was, now)
    paths = "".join(
        f"{name}_temp_path {tmp_path}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"pid {tmp_path}/pid; error_log {tmp_path}/error.log; daemon off; master_process off;\n"
        f"events {{}}\nhttp {{ access_log off;\n{paths}{text}\n}}\n"
    )
    command = [str(NGINX), "-c", str(config), "-p", str(tmp_path)]
    subprocess.run([*command, "-t", "-q"], check=True)
    with subprocess.Popen(command) as process:
        try:
            wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
            context = ssl.create_default_context(cafile=str(names[1]))
            yield http.client.HTTPSConnection("127.0.0.1", port, timeout=WAIT_S, context=context)
        finally:
            process.terminate()
            for sock in held:
                sock.close()


def test_answers_come_through_and_metrics_do_not(front: http.client.HTTPSConnection) -> None:
    for _ in range(4):  # each replica would have had its turn
        front.request("POST", "/v1/completions", json.dumps(COMPLETION), {"Content-Type": "application/json"})
        response = front.getresponse()
        assert response.status == 200 and json.loads(response.read())["object"] == "text_completion"
    front.request("GET", "/metrics")
    response = front.getresponse()
    assert response.status == 403 and b"kvforge_" not in response.read()


def test_a_body_has_the_gateways_bound(front: http.client.HTTPSConnection) -> None:
    front.request("POST", "/v1/completions", b"x", {"Content-Length": str(9 << 20)})
    assert front.getresponse().status == 413


def test_streams_are_not_held_back(front: http.client.HTTPSConnection, triton: FakeTriton) -> None:
    """The answer has no end, so that what comes has come before it."""
    triton.script = endless()
    body = json.dumps({**COMPLETION, "stream": True, "max_tokens": 4000})
    front.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = front.getresponse()
    events = re.findall(rb"data: (\{.*?\})\n\n", b"".join(response.fp.readline() for _ in range(40)))
    assert len(events) >= 3 and all(json.loads(event)["choices"] for event in events)
    front.close()
    response.close()
    wait_until(lambda: triton.requests[-1].cancelled)
