"""Plain-torch rules of eviction keep what kvpress keeps, from the same keys and queries; what differs is measured."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from model_defs import load_config
from tests.support.eviction.kvpress import Case, Run, case_names, load_case
from tests.support.eviction.prompt_rules import (
    attention,
    expected_attention,
    keep,
    keep_in_blocks,
    keep_over_heads,
    keydiff,
    lazy_share,
    mean_attention,
    over_group,
    pyramid_budgets,
    snapkv,
    streaming,
    tova,
)
from tests.support.models.checkpoints import SMALL
from tests.support.rounding import assert_near, model_error

Score = Callable[[Case, int, dict[str, Any]], Tensor]
"""A rule's score ``[kv_heads, tokens]`` from a case, a layer and kvpress's parameters."""

CASES = {name: load_case(name) for name in case_names()}
ROPE_THETA = 10000.0

GAP = 5e-4
"""Between what stays and what goes, in median deviations of the scores: fifty times what kvpress's float32 is off by.
The seeds of the fixtures are chosen so."""


def of_snapkv(case: Case, layer: int, parameters: dict[str, Any]) -> Tensor:
    return snapkv(case.queries[layer], case.keys[layer], parameters["window_size"], parameters["kernel_size"])


def of_tova(case: Case, layer: int, parameters: dict[str, Any]) -> Tensor:
    return tova(case.queries[layer], case.keys[layer], protect_last=True)


def of_keydiff(case: Case, layer: int, parameters: dict[str, Any]) -> Tensor:
    return keydiff(case.keys[layer])


def of_streaming(case: Case, layer: int, parameters: dict[str, Any]) -> Tensor:
    return streaming(*case.keys[layer].shape[:2], parameters["n_sink"])


def of_observed(case: Case, layer: int, parameters: dict[str, Any]) -> Tensor:
    return mean_attention(case.queries[layer], case.keys[layer])


def of_expected(case: Case, layer: int, parameters: dict[str, Any]) -> Tensor:
    sinks, future = parameters["n_sink"], parameters["n_future_positions"]
    return expected_attention(case.queries[layer], case.keys[layer], case.value_norms[layer], ROPE_THETA, sinks, future)


SCORES: dict[str, Score] = {
    "snapkv": of_snapkv,
    "pyramid": of_snapkv,
    "tova": of_tova,
    "keydiff": of_keydiff,
    "streaming": of_streaming,
    "observed": of_observed,
    "expected": of_expected,
}


def is_defined(run: Run) -> bool:
    """kvpress defines the run in full: one without covariances is another rule, and with fewer places than the window
    has, all tokens that may stay have equal scores."""
    whole_window = run.num_kept.min() >= run.parameters.get("window_size", 0)
    return bool(run.parameters.get("use_covariance", True) and whole_window)


def runs(*presses: str, everything: bool = False) -> list[Any]:
    """pytest's parameters: each run of some presses with its case."""
    return [
        pytest.param(case, run, id=f"{name}-{run}")
        for name, case in CASES.items()
        for run in case.runs
        if run.press in presses and (everything or is_defined(run))
    ]


def num_kept(case: Case, run: Run) -> int:
    """What kvpress keeps of each lane: it rounds down what a float makes of the ratio."""
    return max(1, int(case.num_tokens * (1 - run.parameters["compression_ratio"])))


def kept_by(score: Score, case: Case, run: Run) -> Tensor:
    """Return bool ``[layers, kv_heads, tokens]``, with as many tokens in each layer as kvpress has."""
    return torch.stack(
        [keep(score(case, layer, run.parameters), int(run.num_kept[layer, 0])) for layer in range(case.num_layers)]
    )


def score_error(case: Case, layer: int) -> float:
    """How far two computations of a layer's scores lie apart, relative to the largest: as far as those of queries and
    keys, times the largest product of two, as a weight is relatively as far off as its product and its denominator are
    absolutely."""
    config = load_config({"model_type": "llama", "rms_norm_eps": 1e-6} | SMALL | case.recipe.overrides)
    queries, keys = case.queries[layer].norm(dim=-1), case.keys[layer].norm(dim=-1)
    largest = float(queries.max() * keys.max()) * config.head_dim**-0.5
    return 2 * model_error(config, case.num_tokens) * max(largest, 1.0)


def margins(case: Case, run: Run) -> Iterator[float]:
    """Of each lane the gap between what stays and what goes, of the tokens that are not protected, in units of the
    median deviation of their scores. It is infinite where only protected ones stay."""
    assert run.scores is not None
    for layer, (recorded, kept) in enumerate(zip(run.scores.double(), run.kept, strict=True)):
        free = SCORES[run.press](case, layer, run.parameters).isfinite()
        for lane in range(len(recorded)):
            scores, stays = recorded[lane][free[lane]], kept[lane][free[lane]]
            deviation = (scores - scores.median()).abs().median()
            least, most = scores.where(stays, torch.inf).min(), scores.where(~stays, -torch.inf).max()
            yield float((least - most) / deviation)


@pytest.mark.parametrize(("case", "run"), runs(*SCORES))
def test_the_rule_keeps_what_kvpress_keeps(case: Case, run: Run) -> None:
    assert torch.equal(kept_by(SCORES[run.press], case, run), run.kept)


@pytest.mark.parametrize(("case", "run"), runs(*SCORES.keys() - {"streaming"}))
def test_scores_are_those_of_kvpress(case: Case, run: Run) -> None:
    """SnapKV's are means over the window there and sums here; kvpress protects tokens by a score above all others."""
    assert run.scores is not None
    for layer, recorded in enumerate(run.scores):
        score = SCORES[run.press](case, layer, run.parameters) / run.parameters.get("window_size", 1)
        free = score.isfinite()
        assert_near(score[free], recorded.double()[free], score_error(case, layer))
        assert bool((recorded[~free] > recorded[free].max()).all())


@pytest.mark.parametrize(("case", "run"), runs(*SCORES.keys() - {"streaming"}))
def test_no_kept_set_hangs_on_rounding(case: Case, run: Run) -> None:
    assert min(margins(case, run)) > GAP


@pytest.mark.parametrize(("case", "run"), runs(*SCORES.keys() - {"pyramid"}, everything=True))
def test_lanes_keep_equally_many(case: Case, run: Run) -> None:
    assert set(run.num_kept.flatten().tolist()) == {num_kept(case, run)}


def test_a_ratio_of_kvpress_is_a_float() -> None:
    """0.9 of 60 tokens should leave 6 and 0.8 of 200 should leave 40."""
    [few] = [run for run in CASES["short"].of("tova") if run.parameters["compression_ratio"] == 0.9]
    [many] = [run for run in CASES["long"].of("tova") if run.parameters["compression_ratio"] == 0.8]
    assert (int(few.num_kept[0, 0]), int(many.num_kept[0, 0])) == (5, 39)


def group_maximum(case: Case, layer: int, parameters: dict[str, Any]) -> Tensor:
    """SnapKV with the largest of a group's heads where the rule has their mean."""
    keys, queries = case.keys[layer], case.queries[layer]
    repeated = keys.repeat_interleave(len(queries) // len(keys), 0)
    alone = snapkv(queries, repeated, parameters["window_size"], parameters["kernel_size"])
    return alone.unflatten(0, (len(keys), -1)).amax(1)


def per_kv_head(case: Case, layer: int, parameters: dict[str, Any]) -> Tensor:
    """TOVA with a set for each KV head."""
    given = over_group(attention(case.queries[layer][:, -1:], case.keys[layer])[:, 0], len(case.keys[layer]))
    return torch.cat((given[:, :-1], torch.full_like(given[:, :1], torch.inf)), -1)


def sums(case: Case, layer: int, parameters: dict[str, Any]) -> Tensor:
    """Observed attention with H2O's sums."""
    return of_observed(case, layer, parameters) * torch.arange(case.num_tokens, 0, -1)


def long_keys_count_more(case: Case, layer: int, parameters: dict[str, Any]) -> Tensor:
    """KeyDiff with the mean of the keys instead of the mean of their directions."""
    keys = case.keys[layer].double()
    return -torch.cosine_similarity(keys, keys.mean(1, keepdim=True), dim=-1)


OTHERS: list[tuple[str, str, Score]] = [
    ("snapkv", "window", lambda case, layer, p: of_snapkv(case, layer, p | {"window_size": p["window_size"] - 1})),
    ("snapkv", "kernel", lambda case, layer, p: of_snapkv(case, layer, p | {"kernel_size": p["kernel_size"] - 2})),
    ("snapkv", "maximum over the group", group_maximum),
    ("tova", "a set for each KV head", per_kv_head),
    ("keydiff", "keys of any length", long_keys_count_more),
    ("streaming", "a sink less", lambda case, layer, p: of_streaming(case, layer, {"n_sink": p["n_sink"] - 1})),
    ("observed", "sums", sums),
    ("expected", "sinks", lambda case, layer, p: of_expected(case, layer, p | {"n_sink": 0})),
    ("expected", "future", lambda case, layer, p: of_expected(case, layer, p | {"n_future_positions": 8})),
]


@pytest.mark.parametrize(("press", "score"), [pytest.param(o[0], o[2], id=f"{o[0]}-{o[1]}") for o in OTHERS])
def test_the_fixture_tells_rules_apart(press: str, score: Score) -> None:
    recorded = [(case, run) for case in CASES.values() for run in case.of(press) if is_defined(run)]
    differ = [not torch.equal(kept_by(score, case, run), run.kept) for case, run in recorded]
    assert sum(differ) >= len(differ) / 2


def test_tova_protects_no_token_but_kvpress_does() -> None:
    """In random models the last token, if its own query does not choose it, is one token's difference."""
    layers, different = 0, 0
    for case in CASES.values():
        for run in case.of("tova"):
            for layer, kept in enumerate(run.kept):
                unprotected = keep(tova(case.queries[layer], case.keys[layer]), num_kept(case, run))
                chosen = bool(unprotected[0, -1])
                assert bool(kept[:, -1].all())
                assert (unprotected != kept).sum(-1).tolist() == [0 if chosen else 2] * len(kept)
                layers, different = layers + 1, different + (not chosen)
    assert (different, layers) == (18, 33)


def test_snapkv_with_fewer_places_than_its_window_keeps_any_of_the_window() -> None:
    """Here the newest of it stay; in kvpress whichever ones torch.topk returns."""
    [(case, run)] = [(c, r) for c in CASES.values() for r in c.of("snapkv") if not is_defined(r)]
    in_window = torch.arange(case.num_tokens) >= case.num_tokens - run.parameters["window_size"]
    newest = kept_by(of_snapkv, case, run)
    assert not bool((run.kept & ~in_window).any()) and not bool((newest & ~in_window).any())
    assert bool(newest[:, :, -num_kept(case, run) :].all())
    assert not torch.equal(run.kept, newest)


@pytest.mark.parametrize(("case", "run"), runs("keydiff-blocks"))
def test_keydiff_in_blocks(case: Case, run: Run) -> None:
    """kvpress computes the whole prompt first, so only the keys of layer 0 are those of a cache that evicts."""
    for keys, kept in zip(case.keys, run.kept, strict=True):
        assert torch.equal(keep_in_blocks(keys, num_kept(case, run), run.parameters["block_size"]), kept)
    at_once = kept_by(of_keydiff, case, run)
    assert bool((at_once != run.kept).any(-1).all())


@pytest.mark.parametrize(("case", "run"), runs("pyramid"))
def test_pyramid_budgets(case: Case, run: Run) -> None:
    share = 1 - run.parameters["compression_ratio"]
    budgets = pyramid_budgets(
        case.num_tokens, share, case.num_layers, run.parameters["window_size"], run.parameters["beta"]
    )
    assert run.num_kept.tolist() == [[budget] * case.keys.shape[1] for budget in budgets]
    assert abs(sum(budgets) - case.num_layers * case.num_tokens * share) <= case.num_layers / 2


def test_pyramid_rounds_where_snapkv_rounds_down() -> None:
    """kvpress calls it a fallback to SnapKV, yet 37.5 tokens are 38 in one and 37 in the other."""
    case = CASES["three-kv-heads"]
    ratio = {"compression_ratio": 0.7, "window_size": 32, "kernel_size": 5}
    [flat] = [run for run in case.of("pyramid") if ratio.items() <= run.parameters.items()]
    [plain] = [run for run in case.of("snapkv") if ratio.items() <= run.parameters.items()]
    assert set(flat.num_kept.flatten().tolist()) == {38} and set(plain.num_kept.flatten().tolist()) == {37}


@pytest.mark.parametrize(("case", "run"), runs("adakv-snapkv", "adakv-keydiff"))
def test_adakv_divides_a_layers_budget_among_its_heads(case: Case, run: Run) -> None:
    assert run.scores is not None
    floor = run.parameters["alpha_safeguard"]
    for scores, kept in zip(run.scores, run.kept, strict=True):
        assert torch.equal(keep_over_heads(scores, num_kept(case, run), floor), kept)
        assert int(kept.sum()) == len(kept) * num_kept(case, run)
    assert len(set(run.num_kept.flatten().tolist())) > 1


def test_adakv_has_a_floor() -> None:
    case = CASES["short"]
    [run] = [run for run in case.of("adakv-keydiff") if run.parameters["alpha_safeguard"] == 0.9]
    assert run.scores is not None and int(run.num_kept.min()) == int(0.9 * num_kept(case, run))
    without = [keep_over_heads(scores, num_kept(case, run), 0.0) for scores in run.scores]
    assert not torch.equal(torch.stack(without), run.kept)


@pytest.mark.parametrize(("case", "run"), runs("simlayer"))
def test_simlayer_keeps_the_ends_of_lazy_layers(case: Case, run: Run) -> None:
    """The share counts ``n_recent`` tokens before the last one; with the last one, ``n_recent - 1`` stay."""
    initial, recent = run.parameters["n_initial"], run.parameters["n_recent"]
    position = torch.arange(case.num_tokens)
    ends = (position < initial) | (position > case.num_tokens - recent)
    shares = [lazy_share(q, k, initial, recent) for q, k in zip(case.queries, case.keys, strict=True)]
    lazy = [share > run.parameters["lazy_threshold"] for share in shares]
    assert 0 < sum(lazy) < len(lazy)
    for is_lazy, kept in zip(lazy, run.kept, strict=True):
        assert torch.equal(kept, (ends if is_lazy else position >= 0).expand_as(kept))


@pytest.mark.parametrize(("case", "run"), runs("kvzip"))
def test_kvzip_keeps_the_largest_of_all_lanes(case: Case, run: Run) -> None:
    assert run.scores is not None
    every_layer = run.scores.flatten(1) if run.parameters["layerwise"] else run.scores.reshape(1, -1)
    num_dropped = int(every_layer.shape[1] * run.parameters["compression_ratio"])
    kept = keep(every_layer, every_layer.shape[1] - num_dropped)
    assert torch.equal(kept.view_as(run.kept), run.kept)
    assert bool(run.kept[:, :, : run.parameters["n_sink"]].all())
