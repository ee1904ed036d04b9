"""/docs: the OpenAPI document as plain HTML, without scripts and without anything from elsewhere."""

import json
from collections.abc import Awaitable, Callable
from html import escape
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from kvforge.gateway.http.page.static_files import HEADERS


def add_documents(app: FastAPI, document: dict[str, Any]) -> frozenset[str]:
    """Serve both; returns their paths, which need no key: they say what the package says, of any model."""
    files = {"/openapi.json": (json.dumps(document).encode(), "application/json"),
             "/docs": (html_page(document), "text/html")}  # fmt: skip
    for path, (content, kind) in files.items():
        app.router.add_route(path, _giving(content, kind), methods=["GET"])
    return frozenset(files)


def _giving(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def give(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return give


def html_page(document: dict[str, Any]) -> bytes:
    """The whole page."""
    info, schemas = document["info"], document["components"]["schemas"]
    title = escape(f"{info['title']} {info['version']}")
    parts = [f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>',
             f'<p>{escape(info["description"])}</p><p><a href="openapi.json">openapi.json</a></p>']  # fmt: skip
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2>")
            if "requestBody" in operation:
                reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                parts += _table(schemas[reference.rpartition("/")[2]])
            answers = (f"{status} {answer['description']}" for status, answer in operation["responses"].items())
            keys = " Needs a key." if "security" in operation else ""
            parts.append(f"<p>Answers: {escape(', '.join(answers))}{keys}</p>")
    return "\n".join(parts).encode()


def _table(body: dict[str, Any]) -> list[str]:
    rows = ["<table><tr><th>field<th>values<th>default<th>meaning"]
    for name, schema in body["properties"].items():
        default = json.dumps(schema["default"]) if "default" in schema else ""
        cells = (name, _values(schema), "required" if name in body["required"] else default, schema["description"])
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}" for cell in cells))
    return [*rows, "</table>"]


def _values(schema: dict[str, Any]) -> str:
    """What a schema allows beside null, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(filter(None, map(_values, schema["anyOf"]))))
    kinds = schema.get("type", "anything")
    kind = " or ".join(name for name in ([kinds] if isinstance(kinds, str) else kinds) if name != "null")
    bounds = [f"{sign} {schema[name]}" for name, sign in
              (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤")) if name in schema]  # fmt: skip
    return " ".join([kind, *bounds])
