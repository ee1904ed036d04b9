"""Early exit at decode: tokens whose exit is sure take its logits, wherever, whenever and beside whomever."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from kvforge.common.errors import EngineError
from kvforge.runtime import LLMEngine, SamplingParams
from tests.support.sessions.exit import ExitSession
from tests.support.sessions.exit_rule import check_any_sampling, expected_text, serve
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 11, [5, 6, 7, 8], [3]]


@pytest.mark.parametrize("threshold", [1e-9, 0.2, 0.5, 0.9, 0.999, 1.0])
def test_tokens_are_those_of_the_rule(threshold):
    session = ExitSession(agreement=0.5)
    texts, engine = serve(session, PROMPTS, GREEDY, early_exit_threshold=threshold)
    expected = [expected_text(session, prompt, threshold) for prompt in PROMPTS]
    assert [texts[index, 0] for index in range(len(PROMPTS))] == [text.tokens for text in expected]
    stats, num_exits = engine.stats(), sum(text.num_exits for text in expected)
    assert stats["num_early_exits"] == num_exits and stats["num_prompt_early_exits"] == 0
    assert session.num_upper_rows == 24 * len(PROMPTS) - num_exits, "no row runs for nothing"
    if threshold < 1 / 64:
        assert num_exits == 23 * len(PROMPTS) and stats["num_upper_calls"] < stats["num_iterations"]
    elif threshold < 0.95:
        assert 10 < num_exits < 23 * len(PROMPTS)
    if threshold == 1.0:
        assert num_exits == 0 and texts == serve(FakeSession(), PROMPTS, GREEDY)[0]


def test_rows_that_ask_for_logits_do_not_exit():
    plain, _ = serve(FakeSession(), PROMPTS, GREEDY)
    for changes in ({"logprobs": 0}, {"return_logits": True}):
        params = dataclasses.replace(GREEDY, **changes)
        texts, engine = serve(ExitSession(), PROMPTS, params, early_exit_threshold=0.1)
        assert texts == plain and engine.stats()["num_early_exits"] == 0
    engine = LLMEngine(session=ExitSession(), num_pages=100, early_exit_threshold=0.1)
    engine.add_request("asks", PROMPTS[0], dataclasses.replace(GREEDY, logprobs=2))
    engine.add_request("exits", PROMPTS[1], GREEDY)
    tokens = [t for _ in range(24) for o in engine.step() if o.request_id == "asks" for t in o.new_token_ids]
    assert tokens == plain[0, 0] and engine.stats()["num_early_exits"] > 5


def test_texts_do_not_depend_on_the_schedule(seeds, full):
    """Greedy and sampled, with drafts of the request's own, preemption, chunks, prefix hits, neighbours and aborts."""
    counts = Counter()
    for seed in seeds(12, 200):
        stats = check_any_sampling(seed)
        counts.update(
            exits=stats["num_early_exits"],
            upper=stats["num_upper_calls"],
            preempted=stats["num_preemptions"],
            accepted=stats["num_accepted_draft_tokens"],
        )
    assert min(counts[name] for name in ("exits", "upper")) > (150 if full else 50), counts
    assert min(counts.values()) > (2 if full else 0), counts


def test_an_exit_without_finite_logits_is_no_exit():
    class Broken(ExitSession):
        def exit_logits(self, tokens):
            return np.full(self.manifest.vocab_size, np.nan, dtype=np.float32)

    texts, engine = serve(Broken(), PROMPTS, GREEDY, early_exit_threshold=1e-6)
    assert texts == serve(FakeSession(), PROMPTS, GREEDY)[0] and engine.stats()["num_early_exits"] == 0


@pytest.mark.parametrize("threshold", [0.0, -0.1, 1.1, float("nan")])
def test_a_threshold_that_is_no_probability_is_refused(threshold):
    with pytest.raises(EngineError, match=r"early_exit_threshold is .*; give a probability"):
        LLMEngine(session=ExitSession(), num_pages=20, early_exit_threshold=threshold)
    with pytest.raises(EngineError, match=r"this engine has no early exit"):
        LLMEngine(session=FakeSession(), num_pages=20, early_exit_threshold=0.9)
