"""The oracle of eviction evicts when and as many as it should, and is the reference where it does not."""

import dataclasses

import pytest
import torch
from torch import Tensor

from model_defs import ModelConfig
from model_defs.reference import reference_logits
from tests.support.eviction.budgets import BUDGETS
from tests.support.eviction.calendar import WHEN, calendar
from tests.support.eviction.cases import CUT_MODELS, PLAIN_MODELS, Case, random_case
from tests.support.eviction.oracle import run
from tests.support.eviction.rules import ALL, RULES, observed
from tests.support.rounding import assert_near, model_error

Models = dict[str, tuple[ModelConfig, dict[str, Tensor]]]

WITHOUT_EVICTION = [
    (rule, name) for rule in WHEN for name in (PLAIN_MODELS if observed(rule, {}) == ALL else PLAIN_MODELS | CUT_MODELS)
]
SEEDS = range(3)

NOISE = 1e-6
"""Relative noise of weights: ten times as much as fp32's rounding of all of them."""

NEAR = 100 * NOISE
"""A score is a sum or a mean of softmax weights of scores of up to 10, whose errors add those of the layers below: the
noise of the result is some tens of that of the weights."""


BY_THRESHOLD = "kvzap"
"""It looks at its scores every ``block`` tokens, and keeps at most the budget; ``threshold`` 0 is none."""


@pytest.mark.parametrize(("rule", "name"), WITHOUT_EVICTION)
def test_a_budget_of_the_length_is_full_attention(rule: str, name: str, tiny_models: Models) -> None:
    config, weights = tiny_models[name]
    ids = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(1))
    off = {"threshold": 0} if rule == BY_THRESHOLD else {}
    trace = run(config, weights, ids[:30].tolist(), ids[30:].tolist(), rule, 40, 1, spread=3, **off)
    assert (rule == BY_THRESHOLD or not trace.evictions) and trace.logits.dtype == torch.float64
    for eviction in trace.evictions:
        assert all(choice.kept == tuple(range(eviction.computed)) for choice in eviction.lanes.values())
    assert_near(trace.logits, reference_logits(config, weights, ids)[29:].double(), model_error(config, 40))


@pytest.mark.parametrize("name", ["qwen3", "llama-across-biases"])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8, torch.float16])
@pytest.mark.parametrize("static", [False, True])
def test_caches_that_round(name: str, kv_dtype: torch.dtype, static: bool, tiny_models: Models) -> None:
    """fp32's error turns the rounding of some elements by a step, which is sqrt(12) of the rounding's own deviation: of
    one in a hundred (float16, whose steps are the smallest) that is a third of the effect."""
    config, weights = tiny_models[name]
    scales = [(0.02 + 0.001 * i, 0.03 + 0.001 * i) for i in range(len(config.owners))] if static else []
    ids = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(2))
    expected = reference_logits(config, weights, ids, kv_dtype, scales)[29:]
    effect = (expected - reference_logits(config, weights, ids)[29:]).square().mean().sqrt()
    prompt, forced = ids[:30].tolist(), ids[30:].tolist()
    trace = run(config, weights, prompt, forced, "tova", 40, 1, kv_dtype=kv_dtype, kv_scales=scales)
    assert (trace.logits - expected).square().mean().sqrt() < effect / 3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", WHEN)
def test_what_is_kept(rule: str, seed: int, tiny_models: Models) -> None:
    """As many as the calendar says, of those that were there, in every lane, or on average where heads share a budget;
    the prompt's last logits and each forced token's."""
    case = random_case(seed, rule)
    config, weights = tiny_models[case.model]
    trace = case.trace(config, weights)
    lanes = {(owner, head) for owner in config.owners for head in range(config.num_kv_heads)}
    there = dict.fromkeys(lanes, frozenset(range(0)))
    computed = 0
    for eviction, (p, keep) in zip(trace.evictions, case.calendar, strict=True):
        assert eviction.computed == p and eviction.lanes.keys() == lanes
        for lane, choice in eviction.lanes.items():
            assert list(choice.kept) == sorted(set(choice.kept)) and choice.margin >= 0
            assert len(choice.kept) == keep or rule in BUDGETS
            there[lane] |= set(range(computed, p))
            assert there[lane] >= set(choice.kept)
            there[lane] = frozenset(choice.kept)
        lengths = {lane: len(choice.kept) for lane, choice in eviction.lanes.items()}
        if rule == BY_THRESHOLD:  # what is behind a prompt's last whole page is in no page that counts
            assert sum(lengths.values()) <= (keep + len(case.prompt_ids) % case.page_size) * len(lengths)
        else:
            assert sum(lengths.values()) == keep * len(lengths)
        if not any(
            name in rule for name in ("pyramid", "simlayer", "squeeze", "fastgen", "kvzip", BY_THRESHOLD)
        ):  # whose owners share
            for owner in config.owners:
                of_owner = [lengths[owner, head] for head in range(config.num_kv_heads)]
                assert sum(of_owner) == keep * config.num_kv_heads
        computed = p
    assert trace.logits.shape == (len(case.forced_ids) + 1, config.vocab_size) and trace.logits.isfinite().all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", WHEN)
def test_noise_matters_to_near_ties_alone(rule: str, seed: int, tiny_models: Models) -> None:
    case = random_case(seed, rule)
    config, weights = tiny_models[case.model]
    generator = torch.Generator().manual_seed(seed)
    noisy = {
        name: tensor * (1 + NOISE * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        for name, tensor in weights.items()
    }
    certain, others = case.trace(config, weights).certain(NEAR), case.trace(config, noisy).evictions
    for eviction, other in zip(certain, others, strict=False):
        assert {lane: choice.kept for lane, choice in eviction.lanes.items()} == {
            lane: choice.kept for lane, choice in other.lanes.items()
        }


def test_few_evictions_are_uncertain(tiny_models: Models) -> None:
    """Or what is certain would be no test of anything."""
    cases = [random_case(seed) for seed in range(24)]
    traces = [case.trace(*tiny_models[case.model]) for case in cases]
    assert sum(len(t.certain(NEAR)) for t in traces) > 0.8 * sum(len(t.evictions) for t in traces)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8])
def test_sinks_turn_in_8_bit_caches(kv_dtype: torch.dtype, tiny_models: Models) -> None:
    """Rounding shows, and is no more than rounding."""
    config, weights = tiny_models["llama"]
    case = Case("llama", "streaming", 16, 1, {"sinks": 4}, tuple(range(100, 150)), tuple(range(200, 220)))
    exact = case.trace(config, weights).logits
    off = case.trace(config, weights, kv_dtype=kv_dtype).logits - exact
    assert 1e-4 < off.square().mean().sqrt() / exact.std() < 0.2


def test_calendars() -> None:
    """In the words of the rules, for budgets above and below the prompt."""
    assert calendar("keydiff", 10, 14, 6, 3) == [(6, 3), (9, 3), (12, 3)]
    assert calendar("streaming", 3, 9, 6, 1) == [(6, 5), (7, 5), (8, 5)]
    assert calendar("h2o", 10, 14, 6, 3) == [(10, 3), (13, 3)]
    assert calendar("tova", 4, 10, 6, 2) == [(6, 4), (8, 4)]
    assert calendar("batchmax", 10, 12, 6, 4) == [(6, 2), (10, 2)]
    assert calendar("batchmax", 10, 16, 6, 4, decode_only=1) == [(10, 2), (14, 2)]
    assert calendar("snapkv", 10, 20, 6, 1, window=3) == [(10, 6)]
    assert calendar("snapkv", 6, 20, 6, 1) == [] and calendar("snapkv", 10, 10, 6, 1) == []
    assert calendar("h2o", 10, 10, 6, 1) == []


@pytest.mark.parametrize("rule", WHEN)
def test_what_the_budget_bounds(rule: str) -> None:
    """Never more than the budget are cached, than the longer one of prompt and budget, than that and all generated
    tokens, or than the prompt and the budget with a block, by the kind of calendar."""
    for seed in range(200):
        case = random_case(seed, rule)
        due, num_prompt, cached, most = dict(case.calendar), len(case.prompt_ids), 0, 0
        for position in range(num_prompt + len(case.forced_ids)):
            cached = due.get(position, cached) + 1
            most = max(most, cached)
        bound = {
            "always": case.budget,
            "end_decode": max(num_prompt, case.budget),
            "end": max(num_prompt, case.budget) + len(case.forced_ids),
            "end_blocks": max(num_prompt, case.budget + case.block),
        }
        assert most <= bound["end_decode" if case.parameters.get("decode_only") else WHEN[rule]]


def test_random_cases_are_of_every_kind() -> None:
    cases = [random_case(seed) for seed in range(400)]
    assert {case.rule for case in cases} == set(WHEN) == set(RULES)
    assert {case.model for case in cases} == set(PLAIN_MODELS | CUT_MODELS)
    assert sum(len(case.calendar) > 1 for case in cases) > len(cases) / 3
    for case in cases:
        assert 5 <= len(case.prompt_ids) <= 120 and 4 <= case.budget <= 64 and 1 <= case.block <= 16


@pytest.mark.parametrize("rule", WHEN)
def test_evicting_matters(rule: str, tiny_models: Models) -> None:
    config, weights = tiny_models["llama"]
    case = dataclasses.replace(random_case(0, rule), prompt_ids=tuple(range(10, 50)), forced_ids=tuple(range(90, 96)))
    small = dataclasses.replace(
        case, budget=12, block=2, page_size=4, parameters={"spread": 2, "window": 4, "recent": 2}
    )
    full = dataclasses.replace(small, budget=64)
    trace, exact = (each.trace(config, weights) for each in (small, full))
    off = (trace.logits - exact.logits).abs().amax(-1) / exact.logits.abs().max()
    assert off[-1] > 100 * model_error(config, 46)
    before = WHEN[rule] != "always"
    assert (off[0] == 0) == before  # the prompt's last logits know of what happened within the prompt alone


@pytest.mark.parametrize("name", CUT_MODELS)
def test_all_query_rules_need_all_queries(name: str, tiny_models: Models) -> None:
    for rule in ("h2o", "batchmax", "roco"):
        with pytest.raises(ValueError, match="observes all queries"):
            run(*tiny_models[name], range(3, 10), [], rule, 4, 1, spread=1)


def test_bad_arguments(tiny_models: Models) -> None:
    config, weights = tiny_models["llama"]
    windowed = dataclasses.replace(config, layer_windows=(4,) * config.num_layers)
    for sizes, prompt, rule, block, words in (
        (config, [], "h2o", 1, "no token"),
        (config, [5], "lru", 1, "lru is no rule"),
        (config, [5], "h2o", 4, "block is 4"),
        (windowed, [5], "h2o", 1, "sliding window"),
    ):
        with pytest.raises(ValueError, match=words):
            run(sizes, weights, prompt, [], rule, 4, block)


@pytest.mark.parametrize("seed", SEEDS)
def test_tova_keeps_one_set_for_an_owner(seed: int, tiny_models: Models) -> None:
    case = random_case(seed, "tova")
    config, weights = tiny_models["llama-cut" if seed % 2 else "qwen3-tied-mha"]
    for eviction in case.trace(config, weights).evictions:
        for owner in config.owners:
            assert len({eviction.lanes[owner, head].kept for head in range(config.num_kv_heads)}) == 1
