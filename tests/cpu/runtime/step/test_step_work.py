"""Who watches an engine learns of each piece of its work beforehand; a native library's panic ends one request."""

import pytest

from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime import engine as engine_module
from kvforge.runtime.step.work import Work
from kvforge.runtime.text.stop import Stopper
from tests.cpu.runtime.speculation.test_draft_model import drafter_of
from tests.support.schedules.fixed_drafting import speculative_engine
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_PARAMETERS = 10_000
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


class PanicException(BaseException):
    """As a native library raises it."""


def run(engine: LLMEngine) -> dict[str, list]:
    outputs: dict[str, list] = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_invariants()
    return outputs


def watched(engine: LLMEngine) -> list[Work]:
    told: list[Work] = []
    engine.watch(told.append)
    return told


def test_each_piece_is_told_before_it_begins() -> None:
    session = FakeSession(num_parameters=NUM_PARAMETERS)
    engine = LLMEngine(session=session, num_pages=60, max_num_tokens=4)
    calls: list[tuple[str, int]] = []
    engine.watch(lambda work: calls.append((work.kind, engine.runner.num_lower_calls)))
    engine.add_request("a", [5, 6, 7, 8, 9], GREEDY)
    run(engine)
    assert calls == [
        ("prefill", 0), ("decode", 1), ("sample", 2), ("decode", 2), ("sample", 3), ("decode", 3), ("sample", 4)
    ]  # fmt: skip


def test_units_are_tokens_and_what_they_attend_to() -> None:
    session = FakeSession(num_parameters=NUM_PARAMETERS)
    manifest = session.manifest
    of_pair = 2 * manifest.model.num_layers * manifest.model.num_heads * manifest.model.head_dim / NUM_PARAMETERS
    engine = LLMEngine(session=session, num_pages=60, max_num_tokens=8)
    told = watched(engine)
    engine.add_request("a", [5] * 12, GREEDY)
    run(engine)
    units = [work.units for work in told if work.kind != "sample"]
    assert units == pytest.approx([8 + 64 * of_pair, 4 + 48 * of_pair, 1 + 13 * of_pair, 1 + 14 * of_pair])
    assert [work.units for work in told if work.kind == "sample"] == [1, 1, 1]


def test_steps_that_are_captured_have_the_variant_of_their_size() -> None:
    class CapturingSession(FakeSession):
        captures_steps = True

    session = CapturingSession(num_parameters=NUM_PARAMETERS)
    engine = LLMEngine(session=session, num_pages=60)
    told = watched(engine)
    for name in "abc":
        engine.add_request(name, [5] * 7, GREEDY)
    run(engine)
    assert [work.variant for work in told if work.kind == "decode"] == [(2, 4), (2, 4)]
    assert all(work.variant == () for work in told if work.kind == "sample")


def test_a_draft_model_s_steps_are_told_too() -> None:
    engine = speculative_engine(FakeSession(max_draft_len=4), drafter_of(FakeSession()), 3)
    told = watched(engine)
    engine.add_request("a", [5, 6, 7, 8], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    run(engine)
    drafter = engine.drafting.drafter
    assert sum(work.kind == "draft" for work in told) == drafter.stats()["draft_model_num_steps"] > 0


def raising(*arguments: object) -> None:
    raise PanicException("a pattern took too long")


def test_a_panic_in_a_step_ends_its_sequences_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLMEngine(session=FakeSession(), num_pages=60)
    engine.add_request("a", [5, 6], GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "sample", raising)
        (output,) = engine.step()
    assert (output.finish_reason, output.stop_reason) == ("error", "PanicException: a pattern took too long")
    engine.add_request("b", [5, 6], GREEDY)
    assert run(engine)["b"][-1].finish_reason == "length"


def test_a_panic_in_one_sequence_s_end_leaves_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopper, "check", raising)
    engine = LLMEngine(session=FakeSession(), num_pages=60)
    engine.add_request(
        "a", [5, 6], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, stop_words_ids=[[1, 2]])
    )
    engine.add_request("b", [5, 6], GREEDY)
    outputs = run(engine)
    assert [outputs[name][-1].finish_reason for name in "ab"] == ["error", "length"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_passes(monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]) -> None:
    def end(*arguments: object) -> None:
        raise kind

    monkeypatch.setattr(engine_module, "sample", end)
    engine = LLMEngine(session=FakeSession(), num_pages=60)
    engine.add_request("a", [5, 6], GREEDY)
    with pytest.raises(kind):
        engine.step()
