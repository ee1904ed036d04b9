"""The battery of what clients send, against a served engine: its guides, lengths and streams are real ones."""

import http.client
import json
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvforge.serving.server.launcher import TritonServer
from tests.support.clients.battery import PATHS, TEMPLATE, Body, bodies, check_answered, check_refused
from tests.support.serving.gateway_process import MODEL, run_gateway
from tests.support.serving.server import used_pages, wait_until

NEW_TOKENS = 12


def shortened(sent: Body) -> dict[str, Any]:
    """The body for a model that writes noise: few new tokens, whatever the client's own limit is."""
    names = {"responses": ["max_output_tokens"], "completions": ["max_tokens"]}
    given = names.get(sent.endpoint) or [n for n in ("max_tokens", "max_completion_tokens") if n in sent.body]
    return {"model": MODEL, **sent.body, **dict.fromkeys(given or ["max_tokens"], NEW_TOKENS)}


def test_every_body_is_answered_or_refused(server: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    statuses: Counter[int] = Counter()
    with run_gateway(
        server, tmp_path, chat_template=tmp_path / "template.jinja", tool_call_format="hermes", exit_with_parent=True
    ) as gateway:
        parts = urlsplit(gateway.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
        for sent in bodies():
            body = sent.body if sent.endpoint == "embeddings" else shortened(sent)
            connection.request("POST", PATHS[sent.endpoint], json.dumps(body).encode())
            response = connection.getresponse()
            text = response.read().decode()
            statuses[response.status] += 1
            if sent.refused is not None:
                check_refused(sent, response.status, text)
            else:
                assert response.status == 200, (sent, text)
                check_answered(sent, text)
        connection.close()
        wait_until(lambda: used_pages(server) == 0, "pages are given back")
    refused = sum(sent.refused is not None for sent in bodies())
    assert statuses[200] == len(bodies()) - refused and 500 not in statuses
