"""Blocking HTTP requests for load, streamed ones as server-sent events; statuses are returned, not raised."""

import http.client
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from perf.serving.load.client import Answer

TIMEOUT_S = 120.0


def post(
    url: str, body: dict[str, Any], text_of: Callable[[dict[str, Any]], str], cancel_after: int | None = None
) -> Answer:
    """POST ``body`` and collect ``text_of`` every event, or of the one JSON object of an answer that is no stream.

    The answer's code is OK, CANCELLED after ``cancel_after`` events, "HTTP 400" and so on, or UNREACHABLE.
    """
    parts, answer = urlsplit(url), Answer(time.monotonic())
    connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            answer.code, answer.message = f"HTTP {response.status}", response.read().decode(errors="replace")
        elif "event-stream" not in response.getheader("Content-Type", ""):
            _add(answer, response.read(), text_of)
        else:
            _read_events(answer, response, text_of, cancel_after)
    except (OSError, http.client.HTTPException) as error:
        answer.code, answer.message = "UNREACHABLE", f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    answer.ended = time.monotonic()
    return answer


def _read_events(
    answer: Answer, response: http.client.HTTPResponse, text_of: Callable[[dict[str, Any]], str], stop: int | None
) -> None:
    while line := response.readline():
        if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
            continue
        _add(answer, line[5:], text_of)
        if stop is not None and len(answer.pieces) >= stop:
            answer.code = "CANCELLED"
            return


def _add(answer: Answer, payload: bytes, text_of: Callable[[dict[str, Any]], str]) -> None:
    event = json.loads(payload)
    if "error" in event:
        answer.code, answer.message = "ERROR", str(event["error"])
        return
    answer.arrivals.append(time.monotonic())
    answer.pieces.append(text_of(event).encode())


def ensemble_text(event: dict[str, Any]) -> str:
    """The text of an event of Triton's generate and generate_stream."""
    return event["text_output"]


def completion_text(event: dict[str, Any]) -> str:
    """The text of a chunk of /v1/completions; a chunk with usage only has none."""
    return "".join(choice["text"] for choice in event["choices"])


def chat_text(event: dict[str, Any]) -> str:
    """As ``completion_text``, of /v1/chat/completions."""
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
