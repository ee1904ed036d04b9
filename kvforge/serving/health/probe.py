"""Small HTTP calls to a Triton server with nothing but the standard library."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from kvforge.common.errors import KvforgeError

NO_ANSWER = (OSError, http.client.HTTPException)
"""What a call ends in whose server is not there, or dies while it answers."""
READY_TIMEOUT_S = 5.0
METRICS_TIMEOUT_S = 1.0


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_url(url: str | urllib.request.Request, timeout_s: float) -> http.client.HTTPResponse:
    """Ask a server of ours, past the proxies that the environment names: those are for others."""
    response: http.client.HTTPResponse = _DIRECT.open(url, timeout=timeout_s)
    return response


class NoAnswerError(KvforgeError):
    """The server did not answer a request: it ended, or stands still."""


def is_ready(http_url: str) -> bool:
    """True when the server says that it and its models are loaded."""
    try:
        with open_url(f"{http_url}/v2/health/ready", READY_TIMEOUT_S) as response:
            return response.status == 200
    except NO_ANSWER:
        return False


def generate(http_url: str, model: str, body: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
    """POST to the model's `generate` endpoint. Raises KvforgeError with the server's message, NoAnswerError
    without one."""
    request = urllib.request.Request(
        f"{http_url}/v2/models/{model}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with open_url(request, timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise KvforgeError(f"the server refused a request: {_message(error)}") from None
    except (*NO_ANSWER, ValueError) as error:
        raise NoAnswerError(f"the server did not answer: {error}") from None


def read_metrics(metrics_url: str, timeout_s: float = 30.0) -> dict[str, float]:
    """Every sample of the metrics page: 'name{label="value",...}' to number. Raises OSError when there is none."""
    try:
        with open_url(metrics_url, timeout_s) as response:
            lines = response.read().decode().splitlines()
    except http.client.HTTPException as error:
        raise OSError(f"the metrics page broke off: {error}") from None
    samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def has_metrics(metrics_url: str) -> bool:
    """True when somebody gives metrics there."""
    try:
        read_metrics(metrics_url, METRICS_TIMEOUT_S)
    except (OSError, ValueError):
        return False
    return True


def _message(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read().decode(errors="replace")
    except NO_ANSWER:
        return str(error)
    try:
        return json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return text or str(error)
