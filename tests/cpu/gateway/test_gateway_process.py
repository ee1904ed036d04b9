"""The gateway beside the server: one that does not start says why, and leaves nothing behind."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.gateway import GatewayOptions
from kvforge.gateway.http import process
from kvforge.gateway.http.process import GatewayProcess
from kvforge.serving.logs.pump import LogSink
from kvforge.serving.server.start_errors import StartCancelled


@pytest.fixture
def server(tmp_path: Path) -> Any:
    options = SimpleNamespace(manifest_sha256=None)
    return SimpleNamespace(run_dir=tmp_path, engine_dir=tmp_path, grpc_url="", metrics_url="", options=options)


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayProcess]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    made = GatewayProcess(GatewayOptions(), LogSink(None))
    yield made
    made.stop()
    assert list(folder.iterdir()) == []


def plays(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(process, "gateway_command", lambda options: [sys.executable, "-uc", program])


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; print('Warning'); sys.exit('kvforge: there is no tokenizer')", "there is no tokenizer"),
        ("raise SystemExit(3)", r"it ended \(exit status 3\)"),
        ("import os; print('Warning'); os.kill(os.getpid(), 9)", r"it ended \(signal 9\)"),
        ("import time; time.sleep(1000)", "it did not listen within 2 s"),
        ("import time; print('waiting for it'); time.sleep(1000)", "waiting for it"),
    ],
)
def test_one_that_does_not_start_says_why(
    gateway: GatewayProcess, server: Any, monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    plays(monkeypatch, program)
    monkeypatch.setattr(process, "START_TIMEOUT_S", 2.0 if "sleep" in program else 60.0)
    with pytest.raises(KvforgeError, match=f"^the OpenAI gateway did not start: {words}$"):
        gateway.start(server, lambda: False)


def test_a_signal_ends_its_start(gateway: GatewayProcess, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plays(monkeypatch, "import time; time.sleep(1000)")
    with pytest.raises(StartCancelled):
        gateway.start(server, lambda: True)
    gateway.drain()


def test_no_room_to_tell_it_of_the_server(
    gateway: GatewayProcess, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(KvforgeError, match=rf"cannot be written to {tmp_path}/absent \(No such file or directory\)"):
        gateway.start(server, lambda: False)
