"""Request parameters, which are no tensors: the deadline, this server's own, and misspelt inputs.

HTTP's `generate` takes a name that is no input for a request parameter, so a name that nobody knows is refused.
"""

import difflib
import json
import math
import re
from collections.abc import Container, Iterable
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.runtime.requests.checks import MAX_NAME as MAX_SCOPE

TIMEOUT = "timeout"
ERRORS_AS_TENSORS = "errors_as_tensors"
"""Asks `tensorrt_llm` to end a request that fails or is refused with a response instead of an error: for callers within
Triton (bls.py says why) and for the gateway, which wants the outcome and not only its words."""
STOP_TOKEN_IDS = "stop_token_ids"
"""Tokens that end a sequence beside end-of-text, as text: ids with commas between them. `stop_words_list` can name them
too, but as words: a guide does not let them in, and a minimum length does not keep them out."""
STREAMING = "Streaming"
STREAM_INTERVAL = "stream_interval"
"""How many tokens of a sequence leave in a response of a stream. 1: one. More: so many, or all that wait; the first one
alone, and the last ones however few. 0: all that wait. The server's setting where a request does not say."""
MAX_STREAM_INTERVAL = 1 << 20
KEEP_END_TOKEN = "keep_end_token"
"""The token that ends a sequence is to be part of `output_ids`, as in OpenAI's API, which counts it."""
DRAFT_SCOPE = "draft_scope"
"""SamplingParams' field of that name."""
OWN = frozenset({DRAFT_SCOPE, ERRORS_AS_TENSORS, STOP_TOKEN_IDS, STREAM_INTERVAL, KEEP_END_TOKEN})
"""Of `tensorrt_llm`. The text models take some of them, or none."""
TRITONS = frozenset({TIMEOUT, "id", "binary_data_output", "headers"})
"""What Triton itself acts on and may leave among the parameters."""
_NO_SEQUENCES = "it is for Triton's sequence batcher, and every request here is whole"
WITHOUT_EFFECT = {
    STREAMING: "TensorRT-LLM's token client sends it beside its input `streaming`, which is the one that counts",
    "priority": "it is for queues of several priorities, and Triton has one queue here",
    "sequence_id": _NO_SEQUENCES,
    "sequence_start": _NO_SEQUENCES,
    "sequence_end": _NO_SEQUENCES,
}
"""Parameters that may have any value, and why none has an effect."""
MAX_STOP_TEXT = 1 << 16
MAX_TEXT = 1 << 17
"""Characters of all parameters as JSON."""
MAX_NAME = 80
"""Of a name that nobody knows, in a message."""
PREFIX = "triton_"
_MICROSECOND = 1e-6
_NEGATIVE = 2**63
"""Triton reads a negative number over gRPC as one of 64 bits without a sign."""


def read_parameters(request: Any) -> dict[str, Any]:
    """The parameters of a pb_utils.InferenceRequest. Raises RequestError where they are too many or too long."""
    text = request.parameters()
    if text and len(text) > MAX_TEXT:
        raise RequestError(f"the request's parameters have {len(text)} characters", f"give at most {MAX_TEXT}")
    return json.loads(text) if text else {}


def wants_errors_as_tensors(request: Any) -> bool:
    """Whether a request asks for that; one whose parameters cannot be read does not. Never raises."""
    try:
        return bool(read_parameters(request).get(ERRORS_AS_TENSORS))
    except (RequestError, ValueError):
        return False


def client_id(request: Any) -> str:
    """The id that the client gave the request, empty without one. Raises RequestError where it is not UTF-8."""
    try:
        return str(request.request_id())
    except UnicodeDecodeError:
        raise RequestError("the request's id is not valid UTF-8") from None


def check_parameters(parameters: dict[str, Any], inputs: Iterable[str], own: Container[str] = OWN) -> None:
    """Raise RequestError for a parameter that is neither Triton's nor our `own`, nor one WITHOUT_EFFECT; one of
    `inputs` may have been meant."""
    for name in parameters:
        if name in TRITONS or name in own or name in WITHOUT_EFFECT or name.startswith(PREFIX):
            continue
        name = name[:MAX_NAME]
        close = difflib.get_close_matches(name, [other for other in inputs if other != name], n=1)
        hint = f"did you mean '{close[0]}'?" if close else ""
        raise RequestError(f"'{name}' is no input of this model and no request parameter", hint)


def flag(parameters: dict[str, Any], name: str, default: bool) -> bool:
    """A parameter that is true or false. Raises RequestError."""
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise RequestError("must be true or false", field=name)
    return value


def stream_interval(parameters: dict[str, Any], default: int) -> int:
    """That of a request. Raises RequestError."""
    value = parameters.get(STREAM_INTERVAL, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_STREAM_INTERVAL:
        raise RequestError(
            f"is {value!r}",
            f"give 1 for a response a token, a number of tokens up to {MAX_STREAM_INTERVAL}, or 0 for all that wait",
            field=STREAM_INTERVAL,
        )
    return value


def stop_token_ids(parameters: dict[str, Any]) -> list[int]:
    """The tokens of STOP_TOKEN_IDS, none without it. Raises RequestError."""
    text = parameters.get(STOP_TOKEN_IDS, "")
    if (
        not isinstance(text, str)
        or len(text) > MAX_STOP_TEXT
        or not re.fullmatch(r"(\d{1,10}(,\d{1,10})*)?", text, re.ASCII)
    ):
        raise RequestError(
            "cannot be used",
            f"give token ids with commas between them, in at most {MAX_STOP_TEXT} characters",
            field=STOP_TOKEN_IDS,
        )
    return [int(token) for token in text.split(",")] if text else []


def draft_scope(parameters: dict[str, Any]) -> str:
    """That of a request, empty without one. Raises RequestError."""
    value = parameters.get(DRAFT_SCOPE, "")
    if not isinstance(value, str) or len(value) > MAX_SCOPE:
        raise RequestError("cannot be used", f"give a text of at most {MAX_SCOPE} characters", field=DRAFT_SCOPE)
    return value


def timeout_s(request: Any, parameters: dict[str, Any]) -> float | None:
    """The request's deadline in seconds after its arrival: Triton's `timeout`, in microseconds; 0 is none."""
    value = parameters.get(TIMEOUT) or request.timeout()
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, int) and value >= _NEGATIVE:
        value -= 2 * _NEGATIVE
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or value != int(value):
        raise RequestError(f"is {value!r}", "give whole microseconds of at least 0", field="timeout")
    return value * _MICROSECOND or None
