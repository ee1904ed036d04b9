"""Reads a request's JSON body, no more of it than is allowed."""

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from kvforge.gateway.errors import ApiError, bad_field


async def read_json(request: Request, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The body as a JSON object.

    Raises ApiError: 413 as soon as the length is known to be too large (announced or counted), 408 when it does
    not arrive in time, 400 when it is no JSON object.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    try:
        data = await asyncio.wait_for(_read(request, max_bytes), timeout_s)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the request's body did not arrive within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise ApiError(499, "the client went away") from None
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ApiError(400, "the request's body is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request's body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the request's body is not a JSON object")
    if b"\\ud" in data.lower():
        _refuse_half_characters(body)
    return body


async def _read(request: Request, max_bytes: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _refuse_half_characters(body: dict[str, Any]) -> None:
    """A lone surrogate, which JSON may escape, can be written neither to Triton nor into an answer."""
    for name, value in body.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            shown = name.encode("utf-8", "replace").decode()[:80]
            raise bad_field(shown, "holds half a character (a lone surrogate); give Unicode text") from None


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {max_bytes} bytes", code="request_too_large")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
