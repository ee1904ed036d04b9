"""Reads a request's JSON body, no more of it than is allowed."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from kvforge.gateway.errors import ApiError, bad_field, too_deep

MAX_HELD = 32
"""Bodies of the largest size that may be on their way at once."""


class BodyReader:
    """Reads bodies of at most `max_bytes` each, and MAX_HELD times as much of all that are on their way."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body, which counts as held until the context is left.

        Raises ApiError: 413 as soon as the length is known to be too large (announced or counted), 429 when too much
        is on its way already, 408 when it does not arrive in time.
        """
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise _too_large(self._max_bytes)
        data = bytearray()
        try:
            await asyncio.wait_for(self._read(request, data), self._timeout_s)
            yield bytes(data)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the request's body did not arrive within {self._timeout_s:g} s") from None
        except ClientDisconnect:
            raise ApiError(499, "the client went away") from None
        finally:
            self._held -= len(data)

    async def _read(self, request: Request, data: bytearray) -> None:
        async for part in request.stream():
            if len(data) + len(part) > self._max_bytes:
                raise _too_large(self._max_bytes)
            data += part
            self._held += len(part)
            if self._held > MAX_HELD * self._max_bytes:
                raise ApiError(429, "too many large requests are on their way; try again", code="too_many_requests")


def parse(data: bytes) -> dict[str, Any]:
    """A body as a JSON object. Raises ApiError (400) where it is none."""
    try:
        # Decoded here: of bytes, json reads UTF-16 as well, and the half characters that UTF-8 forbids.
        body = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError:
        raise ApiError(400, "the request's body is not UTF-8 text") from None
    except RecursionError:
        raise too_deep() from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the request's body is not JSON: {error}") from None
    except ValueError as error:
        # int() of too many digits speaks of Python's settings.
        what = str(error) if isinstance(error, _NumberError) else "a number in it has too many digits"
        raise ApiError(400, f"the request's body is not JSON: {what}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the request's body is not a JSON object")
    if b"\\ud" in data.lower():
        _refuse_half_characters(body)
    return body


def _refuse_half_characters(body: dict[str, Any]) -> None:
    """A lone surrogate, which JSON may escape, can be written neither to Triton nor into an answer."""
    for name, value in body.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except RecursionError:
            raise too_deep() from None
        except UnicodeEncodeError:
            shown = name.encode("utf-8", "replace").decode()[:80]
            raise bad_field(shown, "holds half a character (a lone surrogate); give Unicode text") from None


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {max_bytes} bytes", code="request_too_large")


class _NumberError(ValueError):
    """What JSON does not have, or no float is as large as."""


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _NumberError(f"{text[:40]} is too large a number")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise _NumberError(f"{name} is not a JSON number")
