"""What a service manager is told, on a socket of the test's own."""

import threading
from pathlib import Path
from typing import Any

import pytest

from kvforge.common.errors import MAX_LINE
from kvforge.serving.processes import service_manager
from kvforge.serving.processes.service_manager import ServiceManager
from tests.support.serving.notify_socket import WAIT_S, listening

FED = {"WATCHDOG_USEC": "30000"}
WELL: dict[str, Any] = {"live": True, "reasons": []}
FROZEN: dict[str, Any] = {"live": False, "reasons": ["no answer", "no token"]}
ILL = "STATUS=no answer; no token"


def follow(manager: ServiceManager, *reports: dict[str, Any]) -> None:
    """Let it tell of each report, and wait until it has."""
    left, is_done = list(reports), threading.Event()

    def report() -> dict[str, Any]:
        if left:
            return left.pop(0)
        is_done.set()
        return FROZEN

    manager.follow(report)
    assert is_done.wait(WAIT_S)
    manager.close()


@pytest.mark.parametrize("is_abstract", [False, True])
def test_start_life_and_end_are_told(is_abstract: bool, tmp_path: Path) -> None:
    with listening(tmp_path, is_abstract) as end:
        manager = ServiceManager({"NOTIFY_SOCKET": end.name, **FED})
        manager.status("starting\nthe engine")
        manager.status("starting")
        manager.ready()
        follow(manager, WELL, FROZEN, FROZEN, WELL)
        told = ["STATUS=starting", "STATUS=serving", "READY=1", "WATCHDOG=1", ILL, "WATCHDOG=1", "STATUS=serving", ILL]
        assert [*end.until(ILL), *end.until(ILL)] == told
        manager = ServiceManager({"NOTIFY_SOCKET": end.name, **FED})
        manager.stopping("30 s")
        follow(manager, WELL, FROZEN, WELL)
        manager.status("end")
        assert end.until("STATUS=end") == ["STOPPING=1", "STATUS=30 s", "WATCHDOG=1", "WATCHDOG=1", "STATUS=end"]


def test_a_status_that_is_no_utf8_or_has_no_end_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with listening(tmp_path) as end:
        manager = ServiceManager({"NOTIFY_SOCKET": end.name})
        manager.status("no engine in /\udcff")
        assert end.until("STATUS=no engine in /\\udcff")
        manager.status("x" * 1_000_000)
        assert end.until(f"STATUS={'x' * MAX_LINE}")
    assert not caplog.messages


@pytest.mark.parametrize("watched", [{}, {**FED, "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}])
def test_no_watchdog_is_fed_that_does_not_watch_this_process(
    watched: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_manager, "PERIOD_S", 0.01)
    with listening(tmp_path) as end:
        follow(ServiceManager({"NOTIFY_SOCKET": end.name, **watched}), WELL)
        assert end.until(ILL) == ["STATUS=serving", ILL]


def test_a_manager_that_is_gone_or_does_not_read_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ServiceManager({}).ready()
    assert not caplog.messages
    ServiceManager({"NOTIFY_SOCKET": "vsock:2:1"}).ready()
    (said,) = caplog.messages
    assert said.startswith("NOTIFY_SOCKET=vsock:2:1 cannot be told STATUS=serving: [Errno 2]")
    monkeypatch.setattr(service_manager, "SEND_TIMEOUT_S", 0.01)
    with listening(tmp_path) as end:
        manager = ServiceManager({"NOTIFY_SOCKET": end.name})
        while len(caplog.messages) == 1:
            manager.ready()
    assert caplog.messages[1].endswith("cannot be told READY=1: timed out")
