"""Verdicts for the prompts of one request, together, at once or later."""

import sys
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.runtime.guides.judge import NUM_WORKERS
from kvforge.runtime.guides.limits import NARROW
from kvforge.runtime.guides.verdict import Verdict
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from kvforge.serving.stub import guide_desk
from kvforge.serving.stub.guide_desk import MAX_GUIDES, NO_TOKENIZER, GuideDesk
from kvforge.workers import WorkersUnavailable
from kvforge.workers.process import WorkerProcess
from tests.support.models.text_tokenizers import byte_level
from tests.support.serving.refusals import refused

A, B = {"kind": "regex", "guide": "a"}, {"kind": "regex", "guide": "b"}
GOOD = Verdict("grammar", NARROW)
WAIT_S = 60.0


class FakeJudge:
    def __init__(self) -> None:
        self.futures: dict[str | None, Future[Verdict]] = {}

    def submit(self, guided: GuidedDecoding) -> "Future[Verdict]":
        return self.futures.setdefault(guided.guide, Future())


def desk_with(judge: FakeJudge, tmp_path: Path) -> GuideDesk:
    desk = GuideDesk(tmp_path, [], "python")
    desk._judge = judge  # type: ignore[assignment]
    return desk


def test_all_come_together(tmp_path: Path) -> None:
    judge, answers = FakeJudge(), []
    desk_with(judge, tmp_path).ask([A, None, B, A], answers.append)
    judge.futures["a"].set_result(GOOD)
    assert not answers
    judge.futures["b"].set_result(Verdict(refusal="no."))
    assert answers == [[GOOD, None, Verdict(refusal="no."), GOOD]]
    desk_with(judge, tmp_path).ask([A], answers.append)
    assert answers[1:] == [[GOOD]]


def test_nobody_can_judge(tmp_path: Path) -> None:
    judge, answers = FakeJudge(), []
    desk_with(judge, tmp_path).ask([A], answers.append)
    judge.futures["a"].set_exception(WorkersUnavailable("later"))
    assert len(answers) == 1 and isinstance(answers[0], KvforgeError)


def test_many_different_guides_in_one_request_are_refused(tmp_path: Path) -> None:
    judge, answers = FakeJudge(), []
    guides = [{"kind": "regex", "guide": "x" * (1 + i % MAX_GUIDES)} for i in range(64)]
    desk_with(judge, tmp_path).ask(guides, answers.append)
    with refused("5 different guides; give at most 4"):
        desk_with(FakeJudge(), tmp_path).ask([*guides, A], answers.append)
    assert len(judge.futures) == MAX_GUIDES and not answers


def test_no_guide_waits_for_a_worker(tmp_path: Path, monkeypatch) -> None:
    """Once the desk has started, all its judges are prepared, and guides that come together start none."""
    pytest.importorskip("llguidance")
    prepared: list[WorkerProcess] = []
    wait_ready = WorkerProcess.wait_ready

    def note(self: WorkerProcess) -> None:
        wait_ready(self)
        prepared.append(self)

    monkeypatch.setattr(WorkerProcess, "wait_ready", note)
    (tmp_path / "tokenizer.json").write_text(byte_level().backend.to_str())
    desk, answers = GuideDesk(tmp_path, [], sys.executable), SimpleQueue()
    try:
        desk.wait_started()
        assert len(prepared) == NUM_WORKERS
        for guide in (A, B, {"kind": "regex", "guide": "c"}):
            desk.ask([guide], answers.put)
        verdicts = [answers.get(timeout=WAIT_S) for _ in range(3)]
        assert [one.refusal for (one,) in verdicts] == [None] * 3
        assert len(prepared) == NUM_WORKERS
    finally:
        desk.close()


def test_judges_that_are_never_ready_are_waited_for_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = Event()
    monkeypatch.setattr(WorkerProcess, "wait_ready", lambda self: closed.wait())
    monkeypatch.setattr(guide_desk, "WARM_WITHIN_S", 0.1)
    (tmp_path / "tokenizer.json").touch()
    desk = GuideDesk(tmp_path, [], sys.executable)
    try:
        desk.wait_started()
        assert f"{NUM_WORKERS} workers that judge guides have not started yet" in caplog.text
    finally:
        closed.set()
        desk.close()


def test_without_a_tokenizer_every_guide_is_refused(tmp_path: Path) -> None:
    answers: list = []
    desk = GuideDesk(tmp_path, [], "python")
    desk.wait_started()
    desk.ask([A, None], answers.append)
    desk.close()
    assert answers == [[NO_TOKENIZER, None]]
