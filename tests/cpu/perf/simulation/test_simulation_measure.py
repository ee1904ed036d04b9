"""Steps of a designed size on an engine: the step that is measured is the step that was designed."""

import contextlib

import pytest

from kvforge.runtime.engine import LLMEngine
from perf.simulation.measure import Design, StepMeter
from tests.support.models.small_models import small_session


def small_engine() -> LLMEngine:
    return LLMEngine(session=small_session({}), enable_prefix_cache=False, num_pages=64)


@pytest.mark.parametrize(
    ("design", "tokens", "survivors"),
    [(Design(2, 20), 2, 2), (Design(0, 0, 16), 16, 0), (Design(3, 20, 8, past=12, is_last=True), 11, 4)],
)
def test_a_designed_step_is_measured(design: Design, tokens: int, survivors: int) -> None:
    meter = StepMeter(small_engine())
    assert meter.fits(design)
    sample = meter.measure(design)
    assert (sample.work.tokens, sample.work.survivors) == (tokens, survivors) and sample.seconds > 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_measured_engine_is_as_it_was(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine()
    runner, config = engine.runner, engine.scheduler.config
    meter = StepMeter(engine)
    if fails:
        monkeypatch.setattr(engine, "step", lambda: pytest.fail("the step failed"))
    with pytest.raises(pytest.fail.Exception) if fails else contextlib.nullcontext():
        meter.measure(Design(2, 20, 8, past=12))
    assert engine.runner is runner and engine.scheduler.config is config
    assert fails or not engine.has_unfinished()
