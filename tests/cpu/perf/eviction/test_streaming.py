"""Texts forced through an engine, and perplexity along them."""

import random

import numpy as np
import pytest
import torch

from kvforge.runtime import LLMEngine
from perf.eviction.streaming import EXPERIMENT, stretches
from perf.harness.forced import forced_logits
from tests.support.eviction.forced import run_forced
from tests.support.models.small_models import small_session
from tests.support.rounding import assert_near, model_error


@pytest.mark.parametrize("policy", ["h2o:budget=100", "streaming:sinks=2,budget=12"])
def test_forced_texts_have_the_logits_of_each_alone(policy: str) -> None:
    session = small_session({"kv_policy": policy}, head_dim=10, cut=3, num_layers=3)
    rng = random.Random(0)
    texts = [[rng.randrange(3, 96) for _ in range(length)] for length in (40, 25, 33)]
    together = LLMEngine(session=session, num_pages=64)
    got: dict[tuple[int, int], np.ndarray] = {}
    for index, place, logits in forced_logits(together, texts):
        assert (index, place) not in got
        got[index, place] = logits
    assert set(got) == {(index, place) for index, text in enumerate(texts) for place in range(1, len(text))}
    for index, text in enumerate(texts):
        _, alone = run_forced(LLMEngine(session=session, num_pages=64), text[:1], text[1:-1])
        several = torch.from_numpy(np.stack([got[index, place] for place in range(1, len(text))]))
        assert_near(several, torch.from_numpy(alone), model_error(session._lower.config, len(text)))
    assert not together.has_unfinished() and together.stats()["num_used_pages"] == 0


def test_forced_texts_may_begin_with_longer_prompts() -> None:
    session = small_session({"kv_policy": "snapkv:budget=16,window=4"}, head_dim=10, cut=3, num_layers=3)
    rng = random.Random(1)
    texts = [[rng.randrange(3, 96) for _ in range(length)] for length in (40, 35)]
    together = LLMEngine(session=session, num_pages=64)
    got = {(index, place): logits for index, place, logits in forced_logits(together, texts, num_prompt=30)}
    assert set(got) == {(index, place) for index, text in enumerate(texts) for place in range(30, len(text))}
    for index, text in enumerate(texts):
        _, alone = run_forced(LLMEngine(session=session, num_pages=64), text[:30], text[30:-1])
        several = torch.from_numpy(np.stack([got[index, place] for place in range(30, len(text))]))
        assert_near(several, torch.from_numpy(alone), model_error(session._lower.config, len(text)))


def test_stretches_leave_out_the_first_token_and_hold_the_mean() -> None:
    loss = np.log(np.array([[99.0, 2.0, 3.0, 4.0, 5.0], [99.0, 8.0, 3.0, 1.0, 5.0]]))
    first, second, third = stretches(loss, 2)
    assert (first["begin"], second["begin"], third["begin"]) == (0, 2, 4)
    assert first["perplexity"] == pytest.approx(4.0)  # of 2 and 8
    assert second["perplexity"] == pytest.approx((12 * 3) ** 0.25)
    assert third["perplexity"] == third["low"] == third["high"] == pytest.approx(5.0)
    assert first["low"] == pytest.approx(2.0) and first["high"] == pytest.approx(8.0)


def test_the_table_names_windows_and_their_ratio() -> None:
    loss = np.log(np.full((3, 100), 2.0))
    row = {"name": "full cache", "stretches": stretches(loss, 10)}
    text = EXPERIMENT.show(
        {"rows": [row], "window": 10, "length": 100, "num_texts": 3, "machine": "a machine", "command": "a command"}
    )
    assert "| full cache | 2.000 (2.000–2.000) |" in text and "| 1.000 |" in text and "window 10 |" in text
