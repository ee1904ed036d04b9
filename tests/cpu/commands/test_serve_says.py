"""What `kvforge serve` says at its start and beside /ready, with a server that is played by a class."""

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvforge.cli import main
from kvforge.commands import serve
from kvforge.serving.server import supervisor
from kvforge.serving.server.options import ServerOptions
from tests.support.serving.serve_process import FREE_OPENAI, FREE_PORTS

SERVED = SimpleNamespace(ports={"http": 1, "grpc": 2, "metrics": 3})


class FakeSupervisor:
    """`options` are those of the last one."""

    options: ServerOptions

    def __init__(self, engine_dir: Path, options: ServerOptions, *_: object) -> None:
        type(self).options = options

    def run(self, announce: Callable[[Any], None], draining: Callable[[], None]) -> None:
        """To be replaced."""

    def report(self) -> dict[str, Any]:
        return {"live": True, "ready": True}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Starts with options; gives the lines that were printed and the answer of /ready."""
    monkeypatch.setattr(supervisor, "Supervisor", FakeSupervisor)
    monkeypatch.setattr(serve, "engine_of", lambda args, predicts: (tmp_path, None))
    monkeypatch.setattr(serve, "load_manifest", lambda path: SimpleNamespace(decoupled_mode=None))
    monkeypatch.setattr(serve, "check_speculation", lambda *_: None)
    ready: list[dict[str, Any]] = []

    def look(self: FakeSupervisor, announce: Callable[[Any], None], draining: Callable[[], None]) -> None:
        announce(SERVED)
        said = capsys.readouterr().out
        url = said.partition("health ")[2].partition("/ready")[0]
        with urllib.request.urlopen(f"{url}/ready", timeout=30) as response:
            ready.append(json.load(response))
        print(said, end="")

    monkeypatch.setattr(FakeSupervisor, "run", look)

    def start(*options: str) -> tuple[list[str], dict[str, Any]]:
        assert main(["serve", str(tmp_path), *(FREE_OPENAI if "--openai" in options else FREE_PORTS), *options]) == 0
        return capsys.readouterr().out.splitlines(), ready[-1]

    return start


def test_each_door_of_loopback_has_a_line(started: Callable[..., Any]) -> None:
    lines, ready = started()
    assert re.fullmatch(r"kvforge: serving .* as model 'ensemble', after [\d.]+ s \(Ctrl-C stops\)", lines[0])
    assert lines[1:4] == [
        "kvforge: HTTP http://127.0.0.1:1",
        "kvforge: gRPC 127.0.0.1:2",
        "kvforge: metrics http://127.0.0.1:3/metrics",
    ]
    assert lines[4].startswith("kvforge: health http://127.0.0.1:") and len(lines) == 5
    assert ready == {"live": True, "ready": True, "open_without_key": []}


def test_doors_that_are_open_without_a_key_are_said_in_another_line(started: Callable[..., Any]) -> None:
    lines, ready = started("--grpc-address", "0.0.0.0")
    assert lines[2] == "kvforge: gRPC 0.0.0.0:2 (IPv6 too)" and len(lines) == 6
    assert lines[5].startswith("kvforge: warning: gRPC: other machines may generate here without a key")
    assert ready["open_without_key"] == ["grpc"]
    options = FakeSupervisor.options
    assert [options.address_of(name) for name in ("http", "grpc", "metrics")] == ["127.0.0.1", "0.0.0.0", "127.0.0.1"]
