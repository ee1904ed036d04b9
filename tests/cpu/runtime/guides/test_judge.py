"""Verdicts on guides: what crashes, hangs or swells ends a worker and is refused, here and when it comes again."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge.runtime.guides.judge import CRASHED, Judge
from kvforge.runtime.guides.limits import NARROW, WIDE, WIDE_JSON
from kvforge.runtime.guides.verdict import Verdict
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from kvforge.workers import WorkersUnavailable
from tests.support.hostile.neighbours.guides import GUIDE_KINDS, KNOWN, random_guide
from tests.support.models.text_tokenizers import byte_level

pytest.importorskip("llguidance")
EOS = 2
DEADLY = ("smallest integer", "one more than the smallest", "from the smallest", "up to the smallest")


def guided(fields: dict) -> GuidedDecoding:
    ((name, guide),) = fields.items()
    return GuidedDecoding(GUIDE_KINDS[name], guide)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(byte_level().backend.to_str())
    judge = Judge(folder, [EOS])
    yield judge
    judge.close()


def verdict(judge: Judge, guide: GuidedDecoding) -> Verdict:
    return judge.submit(guide).result(timeout=120)


@pytest.mark.parametrize("name", DEADLY)
def test_what_crashes_the_library_is_refused_and_known(judge: Judge, name: str) -> None:
    guide = guided(KNOWN[name])
    found = verdict(judge, guide)
    assert found.refusal is None or str(found.refusal).startswith("guided_decoding cannot be used: ")
    started = judge._pool.num_started
    assert verdict(judge, guide) is found and judge._pool.num_started == started


def test_a_crash_is_met_at_all(judge: Judge) -> None:
    """Where llguidance mends it this fails: then take the next guide that crashes it."""
    words = f"guided_decoding cannot be used: {CRASHED}."
    assert str(verdict(judge, guided(KNOWN["smallest integer"])).refusal) == words


@pytest.mark.parametrize("name", ["twenty patterns"])
def test_what_takes_hours_is_refused_after_its_processor_time(judge: Judge, name: str) -> None:
    found = verdict(judge, guided(KNOWN[name]))
    assert found.refusal is not None and "takes more than 1.5 s of processor time" in found.refusal.reason
    assert judge.submit(guided(KNOWN[name])).done()


def test_ambiguous_grammars_get_narrow_limits(judge: Judge) -> None:
    assert verdict(judge, guided(KNOWN["ambiguous"])).limits == NARROW
    assert verdict(judge, guided(KNOWN["empty repetitions"])).limits in (NARROW, WIDE)


def test_wide_schemas_get_wide_limits(judge: Judge) -> None:
    names = {f"p{i}": {"type": "integer"} for i in range(400)}
    assert verdict(judge, GuidedDecoding("json_schema", {"type": "object", "properties": names})).limits == WIDE_JSON
    assert verdict(judge, GuidedDecoding("json")).limits == NARROW


@pytest.mark.parametrize("seed", range(40))
def test_random_guides_get_a_verdict(judge: Judge, seed: int) -> None:
    found = verdict(judge, guided(random_guide(seed)))
    assert (found.refusal is None) == bool(found.grammar)
    assert found.refusal is None or "\n" not in str(found.refusal)
    assert Verdict.from_json(found.to_json()) == found


def test_those_who_ask_at_once_wait_for_one_judgement(judge: Judge) -> None:
    guide = GuidedDecoding("regex", "a{3}at once")
    first, second = judge.submit(guide), judge.submit(guide)
    assert first.result(timeout=120) == second.result(timeout=120) and judge.submit(guide).done()
    assert second is first or second.done()


def test_a_worker_that_somebody_killed_is_no_verdict(judge: Judge) -> None:
    verdict(judge, GuidedDecoding("regex", "warm"))
    waiting = judge.submit(guided(KNOWN["fifteen patterns"]))
    while not judge._pool.pids:
        time.sleep(0.01)
    os.kill(judge._pool.pids[0], signal.SIGKILL)
    assert "processor time" in str(waiting.result(timeout=120).refusal)


def test_an_unusable_tokenizer_refuses_every_guide(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    (tmp_path / "tokenizer.json").write_text(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())
    judge = Judge(tmp_path, [0])
    try:
        assert "guided_decoding cannot use this tokenizer" in str(verdict(judge, GuidedDecoding("json")).refusal)
    finally:
        judge.close()


def test_a_judge_that_is_closed_says_so(tmp_path: Path) -> None:
    judge = Judge(tmp_path, [0])
    judge.close()
    with pytest.raises(WorkersUnavailable):
        verdict(judge, GuidedDecoding("json"))
    assert not judge._open
