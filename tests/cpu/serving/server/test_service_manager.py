"""What a service manager is told, on a socket of the test's own."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvforge.serving.processes import service_manager
from kvforge.serving.processes.service_manager import ServiceManager
from tests.support.serving.notify_socket import WAIT_S, NotifySocket

PERIOD_US = "30000"
WELL: dict[str, Any] = {"live": True, "reasons": []}
FROZEN: dict[str, Any] = {"live": False, "reasons": ["the engine stopped answering", "no token"]}


@pytest.fixture(params=[False, True], ids=["path", "abstract"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NotifySocket]:
    with NotifySocket(tmp_path, request.param) as made:
        yield made


def follow(manager: ServiceManager, reports: list[dict[str, Any]]) -> None:
    """Let it look once at each of the reports, and wait until it has told what it found."""
    left, is_done = list(reports), threading.Event()

    def report() -> dict[str, Any]:
        if not left:
            is_done.set()
            return {"live": False, "reasons": ["the end"]}
        return left.pop(0)

    manager.follow(report)
    assert is_done.wait(WAIT_S)
    manager.close()


def test_start_and_stop_are_told_in_order(listening: NotifySocket) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": listening.name})
    manager.status("starting\nthe engine")
    manager.status("starting")
    manager.ready()
    manager.stopping("30 s to finish")
    assert listening.waiting() == [
        "STATUS=starting",
        "STATUS=serving",
        "READY=1",
        "STOPPING=1",
        "STATUS=30 s to finish",
    ]


def test_a_watchdog_hears_of_a_live_server_alone(listening: NotifySocket) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": listening.name, "WATCHDOG_USEC": PERIOD_US})
    follow(manager, [WELL, FROZEN, FROZEN, WELL])
    assert listening.until("STATUS=the end") == [
        "WATCHDOG=1", "STATUS=serving", "STATUS=the engine stopped answering; no token", "WATCHDOG=1", "STATUS=serving",
        "STATUS=the end",
    ]  # fmt: skip


def test_a_watchdog_hears_of_a_server_that_drains_and_the_status_stays(listening: NotifySocket) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": listening.name, "WATCHDOG_USEC": PERIOD_US})
    manager.stopping("30 s to finish")
    follow(manager, [WELL, FROZEN, WELL])
    assert listening.waiting() == ["STOPPING=1", "STATUS=30 s to finish", "WATCHDOG=1", "WATCHDOG=1"]


@pytest.mark.parametrize("watched", [{}, {"WATCHDOG_USEC": PERIOD_US, "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}])
def test_nobody_is_fed_that_does_not_watch_this_process(
    watched: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_manager, "PERIOD_S", 0.01)
    with NotifySocket(tmp_path) as listening:
        follow(ServiceManager({"NOTIFY_SOCKET": listening.name, **watched}), [WELL])
        assert listening.until("STATUS=the end") == ["STATUS=serving", "STATUS=the end"]


def test_processes_that_are_started_later_do_not_speak_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.setenv(name, "")
    ServiceManager()
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & os.environ.keys()


def test_without_a_socket_nothing_is_told_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager({})
    manager.ready()
    manager.follow(lambda: pytest.fail("asked"))
    assert not caplog.messages


def test_an_address_of_another_kind_is_said(caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager({"NOTIFY_SOCKET": "vsock:2:1"}).ready()
    assert caplog.messages == [
        "NOTIFY_SOCKET=vsock:2:1 is neither a path nor an abstract name: the service manager is not told"
    ]


def test_a_socket_that_is_gone_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    manager.ready()
    manager.stopping("stopping")
    (said,) = caplog.messages
    assert said.startswith("the service manager's socket does not take STATUS: ")


def test_a_manager_that_does_not_read_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_manager, "SEND_TIMEOUT_S", 0.01)
    with NotifySocket(tmp_path) as listening:
        manager = ServiceManager({"NOTIFY_SOCKET": listening.name})
        for number in range(10_000):
            manager.status(f"{number} {'x' * 1000}")
            if caplog.messages:
                break
        assert caplog.messages == ["the service manager's socket does not take STATUS: timed out"]
