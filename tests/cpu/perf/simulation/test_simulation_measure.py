"""Steps of a designed size on an engine: the step that is measured is the step that was designed."""

import pytest

from kvforge.runtime.engine import LLMEngine
from perf.simulation.measure import Design, StepMeter
from tests.support.models.small_models import small_session


@pytest.mark.parametrize(
    ("design", "tokens", "survivors"),
    [(Design(2, 20), 2, 2), (Design(0, 0, 16), 16, 0), (Design(3, 20, 8, past=12, is_last=True), 11, 4)],
)
def test_a_designed_step_is_measured(design: Design, tokens: int, survivors: int) -> None:
    meter = StepMeter(LLMEngine(session=small_session({}), enable_prefix_cache=False, num_pages=64))
    assert meter.fits(design)
    sample = meter.measure(design)
    assert (sample.work.tokens, sample.work.survivors) == (tokens, survivors) and sample.seconds > 0
