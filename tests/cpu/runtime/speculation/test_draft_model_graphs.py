"""A draft model on graphs of real models in fp32: tokens, and K and V of both caches after drafts were rolled back."""

import pytest
import torch

from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.config import resolve_config
from kvforge.runtime.speculation.draft_model import DraftModel
from tests.support.models.small_models import small_session
from tests.support.rounding import assert_near, model_error
from tests.support.schedules.fixed_drafting import speculative_engine
from tests.support.sessions.eager import EagerSession

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[5, 6, 7], [9] * 11, [5, 6, 7, 8], [3, 60, 40, 20, 10] * 4]
GREEDY = {"temperature": 0.0, "max_tokens": 25, "ignore_eos": True}


def make_session(noise=0.0, **options) -> EagerSession:
    """``noise`` makes another model that often agrees."""
    session = small_session({"max_draft_len": 5, **options})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for graph in (session._lower, session._upper):
            for weight in graph.layers.parameters():
                weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
    return session


@pytest.fixture(scope="module")
def target() -> EagerSession:
    return make_session()


@pytest.fixture(scope="module")
def similar() -> EagerSession:
    return make_session(noise=0.15, page_size=8, max_num_tokens=16)


def drafter_of(session):
    return DraftModel(session, resolve_config(session.manifest, 0, num_pages=128), seed=0)


def texts_of(engine, params, after_step=lambda: None):
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, SamplingParams(**params))
    texts = {str(i): [] for i in range(len(PROMPTS))}
    while engine.has_unfinished():
        for output in engine.step():
            texts[output.request_id].append(output.new_token_ids)
        engine.check_invariants()
        after_step()
    return texts


def flat(texts):
    return {request_id: [token for step in steps for token in step] for request_id, steps in texts.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_itself_as_draft_gives_a_token_more_than_drafts_in_every_step(target, temperature):
    engine = speculative_engine(target, drafter_of(target), 5)
    texts = texts_of(engine, {**GREEDY, "temperature": temperature})
    assert all([len(step) for step in steps] == [1, 6, 6, 6, 6] for steps in texts.values())


def stored(pools, pages, count):
    """K and V of a sequence's first ``count`` tokens, of all owners."""
    rows = torch.tensor(pages)
    return [tensor[rows].flatten(0, 1)[:count].clone() for pool in pools for tensor in pool]


def fresh(session, tokens):
    """K and V of a prefill of ``tokens`` in one step, or the fewest."""
    engine = LLMEngine(session=session, num_pages=64, enable_prefix_cache=False)
    engine.add_request("fresh", tokens, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    while not engine.step():
        pass
    (sequence,) = engine.scheduler.running
    return stored(engine.runner.pools, sequence.pages, len(tokens))


def test_after_drafts_both_caches_hold_what_a_fresh_prefill_writes(target, similar):
    drafter = drafter_of(similar)
    engine = speculative_engine(target, drafter, 4)
    num_checked = 0

    def compare():
        nonlocal num_checked
        if engine.num_iterations % 3:
            return
        for sequence in engine.scheduler.running:
            tokens = sequence.tokens[: sequence.num_computed].tolist()
            got = stored(engine.runner.pools, sequence.pages, len(tokens))
            for tensor, wanted in zip(got, fresh(target, tokens), strict=True):
                assert_near(tensor, wanted, model_error(target.config, len(tokens)))
            twin = drafter.cache.twins.get(sequence)
            if twin is None:
                continue
            right = drafter.cache.follow(sequence, 1, ())
            tokens = sequence.tokens[: right.num_computed].tolist()
            got = stored(drafter._runner.pools, right.pages, len(tokens))
            for tensor, wanted in zip(got, fresh(similar, tokens), strict=True):
                assert_near(tensor, wanted, model_error(similar.config, len(tokens)))
            num_checked += 1

    texts = texts_of(engine, GREEDY, compare)
    assert flat(texts) == flat(texts_of(LLMEngine(session=target, num_pages=64), GREEDY))
    stats = engine.stats()
    assert num_checked > 8 and drafter.cache.pool.num_used == 0
    assert 20 < stats["num_accepted_draft_tokens"] < stats["num_draft_tokens"] - 20


def test_seeded_and_adjusted_tokens_are_the_same_with_a_draft_model(target, similar):
    for changes in ({"temperature": 1.0, "seed": 7}, {"repetition_penalty": 1.3, "logprobs": 1}):
        engine = speculative_engine(target, drafter_of(similar), 4)
        params = {**GREEDY, **changes}
        assert flat(texts_of(engine, params)) == flat(texts_of(LLMEngine(session=target, num_pages=64), params))
        assert engine.stats()["num_accepted_draft_tokens"] > 0
