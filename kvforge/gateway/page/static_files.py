"""The page's files, read once and given to whoever asks: nothing in them is of the model or the server."""

import mimetypes
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
_SUFFIXES = {".html", ".css", ".js", ".svg"}
_TYPES = {".js": "text/javascript"}


def read_files() -> dict[str, Response]:
    """The answers by path. Raises OSError where the installation lacks the page."""
    answers = {}
    for file in sorted(FOLDER.iterdir()):
        if file.suffix in _SUFFIXES:
            kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0]
            path = "/" if file.name == INDEX else f"/page/{file.name}"
            answers[path] = Response(file.read_bytes(), media_type=kind, headers=HEADERS)
    return answers


def add_files(app: FastAPI) -> frozenset[str]:
    """Serve them; returns their paths, which need no key."""
    answers = read_files()
    for path, answer in answers.items():
        app.add_api_route(path, _giving(answer), methods=["GET", "HEAD"])
    return frozenset(answers)


def _giving(answer: Response):  # type: ignore[no-untyped-def]
    async def give() -> Response:
        return answer

    return give
