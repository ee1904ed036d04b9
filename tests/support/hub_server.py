"""A Hub on loopback with the parts of its API that a download of a model uses."""

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_a_token_of_the_tests"
_API = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
_RESOLVE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Repository:
    """A folder that is served; ``access`` is "public", "gated" (files need TOKEN) or "private" (all of it does)."""

    folder: Path
    access: str = "public"
    branches: tuple[str, ...] = ("main",)
    commit: str = "a" * 40

    def files(self) -> dict[str, Path]:
        return {str(path.relative_to(self.folder)): path for path in self.folder.rglob("*") if path.is_file()}


@dataclass
class HubServer:
    """What is served, what was asked, and what goes wrong: a file of ``cut`` breaks off after so many bytes, once; the
    content of one of ``withheld`` is refused."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    withheld: set[str] = field(default_factory=set)

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """The environment of a process that uses this Hub with ``cache``, whatever the one of the tests says."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        return kept | {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"} | more

    def downloads(self) -> list[str]:
        """Names of the files whose content was asked for, in order, with the range where there was one."""
        found = ((_RESOLVE.fullmatch(path), span) for method, path, span in self.requests if method == "GET")
        return [f"{match['file']} {span}".strip() for match, span in found if match is not None]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        match = _API.fullmatch(path) or _RESOLVE.fullmatch(path)
        repository = self.hub.repositories.get(match["repository"]) if match else None
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if match is None or repository is None or (repository.access == "private" and not known):
            return self._refuse(401 if match else 404, "RepoNotFound", "Repository not found")
        parts = match.groupdict()
        if (parts["revision"] or "main") not in (*repository.branches, repository.commit):
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        if "file" not in parts:
            return self._describe(parts, repository)
        if repository.access == "gated" and not known:
            return self._refuse(403 if "Authorization" in self.headers else 401, "GatedRepo", "Access is restricted")
        if parts["file"] not in repository.files():
            return self._refuse(404, "EntryNotFound", "Entry not found")
        if parts["file"] in self.hub.withheld and self.command == "GET":
            return self._refuse(410, "", "Something went wrong")
        self._send_file(parts["file"], repository)

    def _describe(self, parts: dict[str, str], repository: Repository) -> None:
        files = repository.files()
        if parts["what"] == "tree":
            content: object = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
                for name, path in files.items()
            ]
        else:
            content = {"id": parts["repository"], "sha": repository.commit, "private": False, "tags": []}
            content |= {"siblings": [{"rfilename": name} for name in files]}
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, repository: Repository) -> None:
        path = repository.files()[name]
        body, start = path.read_bytes(), 0
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        if self.headers.get("Range"):
            start = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        cut = self.hub.cut.pop(name, None) if self.command == "GET" else None
        self._send(206 if start else 200, body[start:], headers, cut)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        self.close_connection = cut is not None


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A Hub without repositories on a free port of loopback."""
    hub = HubServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
