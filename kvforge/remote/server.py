"""One OpenAI-compatible server: JSON answers, and the events of streams."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvforge.common.errors import KvforgeError, first_line
from kvforge.common.extras import import_failed

if TYPE_CHECKING:
    import aiohttp

SCHEMES = ("http://", "https://")
CONNECT_TIMEOUT_S = 10.0
MAX_EVENT_BYTES = 16 << 20
MAX_SAID_BYTES = 64 << 10
"""Of an error's body, what is read."""
_KEY = "give its key by --api-key or $KVFORGE_API_KEY"
_REMEDIES = {
    400: "change what it names",
    401: _KEY,
    403: _KEY,
    404: "--model NAME names another model, and the URL is that of the API, with or without /v1",
    429: "ask for less at a time",
    503: "try again once it has loaded or is less busy",
}


class RefusedError(KvforgeError):
    """The server answered with another ``status`` than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class RemoteServer:
    """The server at ``url``, http://HOST:PORT with or without /v1; an asynchronous context. ``key`` is in no message.

    Raises:
        KvforgeError: it is no such URL. MissingToolError: aiohttp is missing.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            is_wrong = not parts.hostname or parts.port == 0 or "@" in parts.netloc or parts.query or parts.fragment
        except ValueError:
            is_wrong = True
        if is_wrong:
            raise KvforgeError("the URL of the server is wrong; give http://HOST:PORT, and a key by --api-key.")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise KvforgeError("the API key has characters that no HTTP header may have; give the key alone.")
        try:
            import aiohttp
        except Exception as error:
            raise import_failed("Asking a server needs aiohttp", "client", error) from None
        self._aiohttp = aiohttp
        self.root = url.rstrip("/").removesuffix("/v1")
        self.url = f"{self.root}/v1"
        self._key = key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "RemoteServer":
        timeout = self._aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        connector = self._aiohttp.TCPConnector(limit=0)
        self._session = self._aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ask(self, url: str, body: Any = None) -> dict[str, Any]:
        """The JSON object at ``url``, to POST where there is a ``body``. Raises KvforgeError, RefusedError."""
        async with self._open(url, body) as response:
            return self._parsed(await response.read())

    async def model(self) -> str:
        """The first model that it lists. Raises KvforgeError."""
        try:
            listed = (await self.ask(f"{self.url}/models")).get("data")
            return str(listed[0]["id"])  # type: ignore[index]  # what it is not is caught
        except RefusedError as error:
            if error.status != 404:
                raise
        except (TypeError, LookupError):
            pass
        raise KvforgeError(f"{self.url}/models lists no model; name one by --model NAME.")

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of the stream that ``path``, below /v1, answers. Raises KvforgeError, also where the stream has an
        error or no end; RefusedError."""
        rest, ended = b"", False
        async with self._open(f"{self.url}/{path}", {**body, "stream": True}) as response:
            if response.content_type != "text/event-stream":
                raise KvforgeError(f"{self.url}/{path} does not stream; give the URL of an OpenAI-compatible server.")
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_EVENT_BYTES:
                    raise self.strange_answer()
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    if line[5:].strip() == b"[DONE]":
                        ended = True
                        continue
                    event = self._parsed(line[5:])
                    if event.get("error") is not None:
                        raise KvforgeError(f"{self.url} failed: {self.shown(_said(event))}; its log says more.")
                    yield event
        if not ended:
            raise KvforgeError(f"{self.url} ended its answer early; its log says why.")

    @contextlib.asynccontextmanager
    async def _open(self, url: str, body: Any) -> AsyncIterator["aiohttp.ClientResponse"]:
        method = "GET" if body is None else "POST"
        with self._errors_in_words():
            async with self._session.request(method, url, json=body, allow_redirects=False) as response:
                if response.status != 200:
                    said = self.shown(_said(await _beginning(response)))
                    remedy = _REMEDIES.get(response.status)
                    message = f"{url} answered {response.status}{said and f' ({said})'}"
                    raise RefusedError(f"{message}; {remedy or 'its log says why'}.", response.status)
                yield response

    @contextlib.contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        aiohttp = self._aiohttp
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError, aiohttp.InvalidURL) as error:
            raise KvforgeError(
                f"nothing answers at {self.url} ({self.shown(first_line(error))}); start a server there, or give "
                "another URL."
            ) from None
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise KvforgeError(f"{self.url} broke off ({self.shown(first_line(error))}); its log says why.") from None

    def strange_answer(self) -> KvforgeError:
        """The error of an event that has not the form of OpenAI's."""
        return KvforgeError(f"{self.url} streams what is no answer of OpenAI's API.")

    def shown(self, text: str) -> str:
        """What the server sent, fit for a terminal and a log: without the key and without control characters."""
        text = text.replace(self._key, "***") if self._key else text
        return "".join(letter if letter.isprintable() else " " for letter in text)

    def _parsed(self, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise KvforgeError(f"{self.url} does not answer in JSON; give the URL of an OpenAI-compatible server.")
        return found


async def _beginning(response: "aiohttp.ClientResponse") -> str:
    try:
        data = await response.content.readexactly(MAX_SAID_BYTES)
    except asyncio.IncompleteReadError as error:
        data = error.partial
    return data.decode(errors="replace")


def _said(answer: str | dict[str, Any]) -> str:
    """The message of an error, whichever way it is written."""
    found: Any = answer
    if isinstance(answer, str):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(answer)
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return first_line(Exception(found if isinstance(found, str) else "")).rstrip(".") if found else ""
