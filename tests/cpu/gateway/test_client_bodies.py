"""Every body of the battery is answered whole, or refused by the field's name with the reason; none makes a 500."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.gateway.engine_files import write_engine_files
from tests.cpu.gateway.fake_triton import FakeTriton, bytes_of
from tests.cpu.gateway.http_calls import call, post
from tests.support.clients.battery import (
    DOCS,
    FILE,
    PATHS,
    REASONS,
    TEMPLATE,
    Body,
    bodies,
    check_answered,
    check_refused,
    clients,
    updated,
)

CONTEXT = 1 << 16
"""Tokens: some clients ask for 32000 new ones."""


@pytest.fixture(scope="module")
def url(start_shared: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A gateway whose template reads what the templates of reasoning models read."""
    folder: Path = tmp_path_factory.mktemp("battery")
    (folder / "template.jinja").write_text(TEMPLATE)
    engine = write_engine_files(folder / "tiny", max_seq_len=CONTEXT)
    return start_shared(engine=engine, chat_template=folder / "template.jinja", tool_call_format="hermes")


def written(body: dict[str, Any]) -> str:
    """What a model may write that keeps to the body's guide, as far as the way to the client is concerned."""
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return "hello "
    name = choice.get("name") or choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    functions = [tool.get("function", tool) for tool in body.get("tools", []) if tool["type"] == "function"]
    return json.dumps({"name": name or functions[0]["name"], "arguments": {}}) if functions else "hello "


@pytest.mark.parametrize("sent", bodies(), ids=lambda sent: f"{sent.client} {sent.endpoint}")
def test_answered_or_refused_with_a_good_reason(url: str, triton: FakeTriton, sent: Body) -> None:
    triton.script = lambda request: bytes_of(written(sent.body), request, "stop")
    answer = post(f"{url}{PATHS[sent.endpoint]}", {"model": "tiny", **sent.body})
    if sent.refused is None:
        assert answer.status == 200, answer.body
        check_answered(sent, answer.body)
    else:
        check_refused(sent, answer.status, answer.body)
        assert triton.requests == []


def test_the_battery_is_what_it_says() -> None:
    assert len(bodies()) >= 200 and FILE.stat().st_size < 45_000
    assert {body.name for body in bodies() if body.refused} == {*REASONS}
    assert {said["how"] for said in clients().values()} == {"recorded", "read in its source"}
    text = FILE.read_text()
    for name in (
        "continuous_usage_stats", "cache_control", "reasoning_details", "parsed_arguments", "developer", "store",
        "metadata", "service_tier", "prompt_cache_key", "safety_identifier", "verbosity", "include", "truncation",
        "web_search_options", "modalities", "prediction", "client_metadata", "item_reference",
        "provider_specific_fields",
    ):  # fmt: skip
        assert f'"{name}"' in text, name


def test_the_page_has_the_battery() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert updated(text) == text, "run python -m tests.support.clients.battery"
    for name in REASONS:
        assert f"| `{name}` |" in text.split("<!-- /clients -->")[1], name


def test_models_are_listed_as_clients_ask(url: str) -> None:
    for path in ("/v1/models", "/v1/models/tiny", "/health"):
        assert call(url, "GET", path).status == 200
