"""Steps of a designed size on an engine: the step that is measured is the step that was designed."""

import contextlib
import types
from typing import Any

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.runtime.engine import LLMEngine
from model_defs.gated_conv import GatedConv
from perf.simulation.measure import Design, StepMeter
from tests.support.models.small_models import small_session
from tests.support.sessions.fake import fake_manifest
from tests.support.sessions.fake_states import STATES


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


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"layer_windows": (0, 8)}, "sliding windows"),
        ({"linear": STATES, "num_layers": 3, "cut": 3}, "linear attention"),
        ({"linear": GatedConv((0,), 2, 3), "num_layers": 3, "cut": 3}, "gated short convolutions"),
        ({"num_anchors": 4}, "a blind cut"),
        ({"kv_policy": "keydiff"}, "the KV policy keydiff"),
        ({"kv_dtype": "kivi3", "head_dim": 32, "page_size": 32}, "a cache of kivi3"),
    ],
)
def test_what_prices_do_not_count_is_refused(changes: dict[str, Any], what: str) -> None:
    engine: Any = types.SimpleNamespace(manifest=fake_manifest(**changes))
    with pytest.raises(KvforgeError, match=f"steps and memory of engines with {what} are not modelled; fit another"):
        StepMeter(engine)


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
