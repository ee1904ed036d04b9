"""Small HTTP calls to a Triton server with nothing but the standard library."""

import json
import urllib.error
import urllib.request
from typing import Any

from kvforge.errors import KvforgeError


def is_ready(http_url: str) -> bool:
    """True when the server says that it and its models are loaded."""
    try:
        with urllib.request.urlopen(f"{http_url}/v2/health/ready", timeout=2.0) as response:
            return response.status == 200
    except OSError:
        return False


def generate(http_url: str, model: str, body: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
    """POST to the model's `generate` endpoint. Raises KvforgeError with the server's message."""
    request = urllib.request.Request(
        f"{http_url}/v2/models/{model}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise KvforgeError(f"the server refused a request: {_message(error)}") from None
    except OSError as error:
        raise KvforgeError(f"the server did not answer: {error}") from None


def read_metrics(metrics_url: str) -> dict[str, float]:
    """Every sample of the metrics page: 'name{label="value",...}' to number."""
    with urllib.request.urlopen(metrics_url, timeout=5.0) as response:
        lines = response.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def _message(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return text or str(error)
