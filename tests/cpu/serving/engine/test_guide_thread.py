"""Commands with guides wait for their compilation beside the step loop; all others pass."""

import queue
import threading

from kvforge.common.errors import RequestError
from kvforge.serving.engine.guide_thread import COMPILED, GUIDE, GuideThread

WAIT_S = 60.0


class Desk:
    """What a GuideThread calls; `go` lets one compilation go on."""

    def __init__(self) -> None:
        self.back: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self.refused: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.go = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.known: dict[str, str] = {}
        self.thread = GuideThread(
            self._known, self._compile, self.back.put, lambda c, why: self.refused.put((c["id"], str(why)))
        )

    def _known(self, command: dict) -> str | None:
        if command[GUIDE] == "bad to know":
            raise BaseException("native")
        return self.known.get(command[GUIDE])

    def _compile(self, command: dict) -> str:
        self.begun.release()
        assert self.go.acquire(timeout=WAIT_S)
        if command[GUIDE] == "bad":
            raise RequestError("no")
        if command[GUIDE] == "panic":
            raise BaseException("native")
        return f"compiled {command[GUIDE]}"

    def add(self, name: str, guide: str | None = None) -> str | None:
        """The guide with which it can be carried out now, "" without one; None where it waits."""
        command = {"op": "add", "id": name, **({} if guide is None else {GUIDE: guide})}
        return command.get(COMPILED, "") if self.thread.is_ready(command) else None

    def next(self) -> dict:
        return self.back.get(timeout=WAIT_S)


def test_commands_without_guides_pass_those_that_wait() -> None:
    desk = Desk()
    assert desk.add("slow", "x") is None
    assert desk.begun.acquire(timeout=WAIT_S)
    assert desk.add("plain") == ""
    desk.go.release()
    command = desk.next()
    assert (command["id"], command[COMPILED]) == ("slow", "compiled x")
    assert desk.thread.is_ready(command) and not desk.thread.is_ready(command)


def test_a_guide_that_is_known_does_not_wait_for_others() -> None:
    desk = Desk()
    assert desk.add("slow", "x") is None
    assert desk.begun.acquire(timeout=WAIT_S)
    desk.known["y"] = "known y"
    assert desk.add("quick", "y") == "known y"
    desk.go.release()
    assert desk.next()["id"] == "slow"


def test_what_fails_is_refused_and_the_next_goes_on() -> None:
    desk = Desk()
    desk.go.release(4)
    for name, guide in (("a", "bad"), ("b", "panic"), ("c", "good"), ("d", "bad to know")):
        assert desk.add(name, guide) is None
    assert desk.next()["id"] == "c"
    assert desk.next()[COMPILED] == "compiled bad to know"
    assert desk.refused.get(timeout=WAIT_S) == ("a", "no.")
    assert desk.refused.get(timeout=WAIT_S) == ("b", "guided_decoding could not be compiled; change it.")
    assert desk.thread._waiting == {"c", "d"}, "what is refused is forgotten"


def test_a_request_that_is_aborted_meanwhile_never_comes() -> None:
    """Neither one that is compiled, nor one that waits, nor one that is on its way back."""
    desk = Desk()
    for name in ("a", "b"):
        assert desk.add(name, "x") is None
    assert desk.begun.acquire(timeout=WAIT_S)
    for name in ("a", "b"):
        desk.thread.abort(name)
    assert desk.add("c", "z") is None
    desk.go.release(3)
    first, second = desk.next(), desk.next()
    assert [first["id"], second["id"]] == ["a", "c"]
    assert not desk.thread.is_ready(first)
    desk.thread.abort("c")
    assert not desk.thread.is_ready(second)
