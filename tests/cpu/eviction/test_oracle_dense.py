"""The oracle of eviction agrees with masks of dense attention matrices, layer by layer."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model_defs import ModelConfig
from tests.support.eviction.cases import Case, random_case
from tests.support.eviction.dense import Past, Scores, dense
from tests.support.rounding import layer_terms, relative_error, sum_error

Models = dict[str, tuple[ModelConfig, dict[str, Tensor]]]

SEEDS = range(4)


def protect(scores: Tensor, where: Tensor) -> Tensor:
    return scores.masked_fill(where, math.inf)


def ages(past: Past) -> Tensor:
    return torch.arange(past.alive.shape[-1], 0, -1)


def position(past: Past) -> Tensor:
    return torch.arange(past.alive.shape[-1]).expand_as(past.alive).double()


def streaming(case: Case) -> Scores:
    return lambda past: protect(position(past), position(past) < case.parameters["sinks"])


def recent(case: Case) -> Scores:
    return position


def h2o(case: Case) -> Scores:
    return lambda past: protect(past.weights.sum(1), ages(past) <= case.budget // 2)


def scissorhands(case: Case) -> Scores:
    def scores(past: Past) -> Tensor:
        p = past.alive.shape[-1]
        before = max([0, *(earlier for earlier, _ in case.calendar if earlier < p)])
        below = (past.weights < 1 / past.sees.sum(-1, keepdim=True)) & past.sees
        counts = below[:, max(before, p - case.parameters["history"]) :].sum(1)
        return protect(position(past) / (4 * p) - counts, ages(past) <= case.parameters["recent"])

    return scores


def tova(case: Case) -> Scores:
    return lambda past: past.weights[:, -1].mean(0).expand_as(past.alive)


def snapkv(case: Case) -> Scores:
    window, kernel = case.parameters["window"], case.parameters["kernel"]

    def scores(past: Past) -> Tensor:
        given = past.weights[:, -window:, :-window].sum(1)
        pooled = F.avg_pool1d(given, kernel, stride=1, padding=kernel // 2)
        return F.pad(pooled, (0, window), value=math.inf)

    return scores


def batchmax(case: Case) -> Scores:
    return lambda past: past.weights.sum(1) / ages(past)


def keydiff(case: Case) -> Scores:
    def scores(past: Past) -> Tensor:
        keys = torch.cat((past.keys.real, past.keys.imag), -1)
        directions = F.normalize(keys, dim=-1) * past.alive[..., None]
        return -F.cosine_similarity(keys, directions.sum(1, keepdim=True), dim=-1)

    return scores


def roco(case: Case) -> Scores:
    sinks, spread = case.parameters["sinks"], case.parameters["spread"]

    def scores(past: Past) -> Tensor:
        mean = past.weights.sum(1) / ages(past)
        deviation = (past.weights.square().sum(1) / ages(past) - mean.square()).clamp(min=0).sqrt()
        by_width = (deviation + 1e-12 * position(past)).masked_fill(~past.alive, -1)  # what saw one query has none
        wide = torch.zeros_like(past.alive).scatter(1, by_width.topk(spread, -1).indices, True)
        return protect(mean, wide | (position(past) < sinks))

    return scores


DENSE: dict[str, Callable[[Case], Scores]] = {
    rule.__name__: rule for rule in (streaming, recent, h2o, scissorhands, tova, snapkv, batchmax, keydiff, roco)
}


def check(case: Case, model: tuple[ModelConfig, dict[str, Tensor]]) -> None:
    config, weights = model
    trace = case.trace(config, weights)
    ids = torch.tensor(case.prompt_ids + case.forced_ids)
    sinks = case.parameters["sinks"] if case.rule == "streaming" else 0
    logits, kept = dense(config, weights, ids, dict(case.calendar), DENSE[case.rule](case), sinks)
    assert {key: kept[key] for key in kept if key[1] in config.owners} == {
        (eviction.computed, owner, head): choice.kept
        for eviction in trace.evictions
        for (owner, head), choice in eviction.lanes.items()
    }
    error = relative_error(trace.logits, logits[len(case.prompt_ids) - 1 :])
    assert error < sum_error(config.num_layers * layer_terms(config, len(ids)), dtype=torch.float64)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", sorted(DENSE))
def test_the_same_is_kept_and_said(rule: str, seed: int, tiny_models: Models) -> None:
    """Kept positions are equal and logits as near as float64 is: near-ties of rounding are none of these cases. Masks
    keep as many tokens of every head, so rules whose heads share a budget are not among them."""
    case = random_case(seed, rule, with_cut=False)
    check(case, tiny_models[case.model])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", ["streaming", "recent", "scissorhands", "tova", "snapkv", "keydiff"])
def test_cuts(rule: str, seed: int, tiny_models: Models) -> None:
    """Where a rule observes attention, owners have one layer that reads them."""
    case = random_case(seed, rule, with_cut=True)
    if rule in ("scissorhands", "tova", "snapkv"):
        case = dataclasses.replace(case, model="llama-cut")
    check(case, tiny_models[case.model])


@pytest.mark.parametrize("name", ["llama-across-biases", "qwen3-across"])
def test_layers_that_read_one_owner_add_up(name: str, tiny_models: Models) -> None:
    """The first eviction after a prompt is by all layers' attention to it."""
    config, weights = tiny_models[name]
    prompt, keep = tuple(range(100, 160)), 20
    layers: list[Past] = []

    def remember(past: Past) -> Tensor:
        layers.append(past)
        return position(past)

    dense(config, weights, torch.tensor([*prompt, 5]), {60: 60}, remember, 0)
    for case in (
        Case(name, "tova", 30, 10, {}, prompt, (5,)),
        Case(name, "snapkv", keep, 1, {"window": 8, "kernel": 3}, prompt, (5,)),
        Case(name, "scissorhands", 30, 10, {"history": 16, "recent": 4}, prompt, (5,)),
    ):
        (eviction,) = case.trace(config, weights).evictions
        for owner in config.owners:
            readers = [past for past, read in zip(layers, config.owner_of_layer, strict=True) if read == owner]
            total = sum(DENSE[case.rule](case)(past) for past in readers)
            for head in range(config.num_kv_heads):
                expected = total[head].topk(keep).indices.sort().values
                assert eviction.lanes[owner, head].kept == tuple(expected.tolist())


@pytest.mark.parametrize("decode_only", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_both_calendars_of_batchmax(seed: int, decode_only: int, tiny_models: Models) -> None:
    case = random_case(seed, "batchmax", with_cut=False)
    check(dataclasses.replace(case, parameters={"decode_only": decode_only}), tiny_models[case.model])


def test_h2o_sums_a_prompt_s_attention(tiny_models: Models) -> None:
    """The first eviction after a prompt is by the columns of its attention matrix, in which nothing is missing."""
    config, weights = tiny_models["llama"]
    prompt, keep = tuple(range(100, 160)), 15
    case = Case("llama", "h2o", 16, 1, {}, prompt, (5,))
    columns: list[Tensor] = []

    def remember(past: Past) -> Tensor:
        assert past.alive.all() and past.sees.sum() == 2 * 60 * 61 / 2
        columns.append(past.weights.sum(1))
        return columns[-1]

    dense(config, weights, torch.tensor([*prompt, 5]), {60: keep}, remember, 0)
    (eviction,) = case.trace(config, weights).evictions
    for (owner, head), choice in eviction.lanes.items():
        heavy = columns[owner][head, :52].topk(keep - 8)
        assert choice.kept == (*sorted(heavy.indices.tolist()), *range(52, 60))
        assert choice.score == pytest.approx(float(heavy.values[-1]))
