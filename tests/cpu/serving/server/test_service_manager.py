"""What a service manager is told, on a socket of the test's own."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvforge.serving.processes import service_manager
from kvforge.serving.processes.service_manager import ServiceManager
from tests.support.serving.notify_socket import WAIT_S, NotifySocket, listening

FED = {"WATCHDOG_USEC": "30000"}
WELL: dict[str, Any] = {"live": True, "reasons": []}
FROZEN: dict[str, Any] = {"live": False, "reasons": ["no answer", "no token"]}


@pytest.fixture(params=[False, True], ids=["path", "abstract"])
def manager_end(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NotifySocket]:
    with listening(tmp_path, request.param) as made:
        yield made


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


def test_a_start_and_a_live_server_are_told(manager_end: NotifySocket) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": manager_end.name, **FED})
    manager.status("starting\nthe engine")
    manager.status("starting")
    manager.ready()
    follow(manager, WELL, FROZEN, FROZEN, WELL)
    manager.status("end")
    assert manager_end.until("STATUS=end")[:7] == [
        "STATUS=starting", "STATUS=serving", "READY=1", "WATCHDOG=1", "STATUS=no answer; no token", "WATCHDOG=1",
        "STATUS=serving",
    ]  # fmt: skip


def test_a_server_that_drains_is_watched_and_its_status_stays(manager_end: NotifySocket) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": manager_end.name, **FED})
    manager.stopping("30 s")
    follow(manager, WELL, FROZEN, WELL)
    manager.status("end")
    told = ["STOPPING=1", "STATUS=30 s", "WATCHDOG=1", "WATCHDOG=1", "STATUS=end"]
    assert manager_end.until("STATUS=end") == told


@pytest.mark.parametrize("watched", [{}, {**FED, "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}])
def test_no_watchdog_is_fed_that_does_not_watch_this_process(
    watched: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_manager, "PERIOD_S", 0.01)
    with listening(tmp_path) as end:
        follow(ServiceManager({"NOTIFY_SOCKET": end.name, **watched}), WELL)
        assert end.until("STATUS=no answer; no token") == ["STATUS=serving", "STATUS=no answer; no token"]


def test_later_processes_do_not_speak_for_it_and_without_a_socket_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
    for name in names:
        monkeypatch.setenv(name, "")
    manager = ServiceManager()
    assert not names & os.environ.keys()
    manager.ready()
    manager.follow(lambda: pytest.fail("asked"))
    assert not caplog.messages


@pytest.mark.parametrize("name", ["vsock:2:1", "/gone"])
def test_a_socket_that_cannot_be_told_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": name})
    manager.ready()
    manager.stopping("stopping")
    assert caplog.messages == [
        f"NOTIFY_SOCKET={name} cannot be told STATUS=serving: [Errno 2] No such file or directory"
    ]


def test_a_manager_that_does_not_read_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_manager, "SEND_TIMEOUT_S", 0.01)
    with listening(tmp_path) as end:
        manager = ServiceManager({"NOTIFY_SOCKET": end.name})
        while not caplog.messages:
            manager.ready()
    assert caplog.messages[0].endswith("cannot be told READY=1: timed out")
