"""The page's files, read once and given to whoever asks: nothing in them is of the model or the server."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

FOLDER = Path(__file__).parent
INDEX = "index.html"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Scripts and styles come from files of this server alone, connections go nowhere else, and no page frames this one."""
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def add_files(app: FastAPI) -> frozenset[str]:
    """Serve them; returns their paths, which need no key. Raises OSError where one cannot be read."""
    paths = set()
    for file in sorted(FOLDER.iterdir()):
        if file.suffix in _TYPES:
            path = "/" if file.name == INDEX else f"/page/{file.name}"
            app.add_api_route(path, _giving(file.read_bytes(), _TYPES[file.suffix]), methods=["GET", "HEAD"])
            paths.add(path)
    return frozenset(paths)


def _giving(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def give() -> Response:
        # One for each request: other layers add to an answer's headers.
        return Response(content, media_type=kind, headers=HEADERS)

    return give
