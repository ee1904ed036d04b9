"""Commands with guides wait for their compilation beside the step loop; all others pass."""

import queue
import threading

from kvforge.errors import RequestError
from kvforge.serving.guide_thread import GUIDE, GuideThread

WAIT_S = 60.0


class Desk:
    """What a GuideThread calls; `go` lets one compilation go on."""

    def __init__(self) -> None:
        self.forwarded: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self.refused: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.go = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.thread = GuideThread(self._compile, self.forwarded.put, lambda c, why: self.refused.put((c["id"], why)))

    def _compile(self, command: dict) -> str:
        self.begun.release()
        assert self.go.acquire(timeout=WAIT_S)
        if command[GUIDE] == "bad":
            raise RequestError("no.")
        if command[GUIDE] == "panic":
            raise BaseException("native")
        return f"compiled {command[GUIDE]}"

    def add(self, name: str, guide: str | None = None) -> None:
        self.thread.put({"op": "add", "id": name, **({} if guide is None else {GUIDE: guide})})

    def next(self) -> dict:
        return self.forwarded.get(timeout=WAIT_S)


def test_commands_without_guides_pass_those_that_wait() -> None:
    desk = Desk()
    desk.add("slow", "x")
    assert desk.begun.acquire(timeout=WAIT_S)
    desk.add("plain")
    desk.thread.put({"op": "abort", "id": "somebody"})
    assert [desk.next()["id"], desk.next()["op"]] == ["plain", "abort"]
    desk.go.release()
    assert desk.next() == {"op": "add", "id": "slow", GUIDE: "compiled x"}


def test_what_fails_is_refused_and_the_next_goes_on() -> None:
    desk = Desk()
    desk.go.release(3)
    for name, guide in (("a", "bad"), ("b", "panic"), ("c", "good")):
        desk.add(name, guide)
    assert desk.next()["id"] == "c"
    assert desk.refused.get(timeout=WAIT_S) == ("a", "no.")
    assert desk.refused.get(timeout=WAIT_S) == ("b", "the guide could not be compiled; change it")


def test_a_request_that_is_aborted_meanwhile_never_comes() -> None:
    desk = Desk()
    desk.add("a", "x")
    desk.add("b", "y")
    assert desk.begun.acquire(timeout=WAIT_S)
    for name in ("a", "b"):
        desk.thread.put({"op": "abort", "id": name})
    desk.add("c", "z")
    desk.go.release(3)
    assert [desk.next()["op"], desk.next()["op"]] == ["abort", "abort"]
    assert desk.next()["id"] == "c"
