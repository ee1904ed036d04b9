"""An engine's policies keep of the fixtures' prompts what kvpress kept of them."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvforge.compiler import BuildOptions
from kvforge.kv_policies import parse
from kvforge.runtime import LLMEngine, SamplingParams
from tests.support.eviction.kept import Kept, KeptSets
from tests.support.eviction.kvpress import Case, Run, case_names, load_case
from tests.support.models.checkpoints import make_checkpoint
from tests.support.sessions.eager import eager_session

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {name: load_case(name) for name in case_names()}
PRESSES = (
    "snapkv",
    "adakv-snapkv",
    "pyramid",
    "simlayer",
    "kvzip",
    "expected",
    "streaming",
    "tova",
    "keydiff",
    "keydiff-blocks",
)


def policy_of(run: Run) -> str | None:
    """The policy that leaves as many tokens at the prompt's end as kvpress did. None for SnapKV with fewer places than
    its window has, which is another rule, for an epsilon added to weights, and where kvpress gives all layers the same
    or ends its line at the prompt less the window, and where KVzip has no whole number of tokens a head or takes those
    of each layer alone."""
    given, kept = run.parameters, int(run.num_kept[0, 0])
    mean, lazy = -(-int(run.num_kept[:, 0].sum()) // len(run.num_kept)), int(run.num_kept.min())
    match run.press:
        case "snapkv":
            if kept < given["window_size"]:
                return None
            return f"snapkv:budget={kept},window={given['window_size']},kernel={given['kernel_size']}"
        case "adakv-snapkv":
            mean, floor = int(run.num_kept[0].sum()) // run.kept.shape[1], round(100 * given["alpha_safeguard"])
            more = f"window={given['window_size']},kernel={given['kernel_size']},floor_percent={floor}"
            return f"adakv:budget={mean},{more}"
        case "expected":
            if given["epsilon"]:
                return None
            more = f"sinks={given['n_sink']},covariance={int(given['use_covariance'])}"
            return f"expected:budget={kept},window={run.kept.shape[-1]},future={given['n_future_positions']},{more}"
        case "pyramid":
            if kept in (int(run.num_kept[-1, 0]), run.kept.shape[-1] - given["window_size"]):
                return None
            more = f"window={given['window_size']},kernel={given['kernel_size']},beta={given['beta']}"
            return f"pyramid:budget={mean},{more}"
        case "simlayer":
            more = f"sinks={given['n_initial']},recent={lazy - given['n_initial']}"
            return f"simlayer:budget={int(run.num_kept[:, 0].sum()) // len(run.num_kept)},{more}"
        case "kvzip":
            total, lanes = int(run.num_kept.sum()), run.num_kept.numel()
            if given["layerwise"] or total % lanes:
                return None
            return f"kvzip:budget={total // lanes},sinks={given['n_sink']}"
        case "streaming":
            return f"streaming:budget={kept + 1},sinks={given['n_sink']}"
        case "tova":
            return f"tova:budget={kept + 1}"
        case "keydiff":
            return f"keydiff:budget={run.kept.shape[-1]},block={run.kept.shape[-1] - kept}"
        case "keydiff-blocks":
            return f"keydiff:budget={kept + given['block_size']},block={given['block_size']}"
    raise AssertionError(run.press)


def runs() -> list:
    return [
        pytest.param(name, run, id=f"{name}-{run}")
        for name, case in CASES.items()
        for press in PRESSES
        for run in case.of(press)
        if policy_of(run) is not None
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kvpress")
    return {
        name: make_checkpoint(folder / name, seed=case.recipe.seed, **case.recipe.overrides)
        for name, case in CASES.items()
    }


def evictions(checkpoint: Path, policy: str, prompt: list[int]) -> Kept:
    """What an engine keeps of the prompt, after every eviction up to its end."""
    page_size = 1 if parse(policy).insertion.views_pools else 4  # kvpress divides a budget by tokens
    limits = {"max_num_seqs": 2, "max_num_tokens": 32, "max_seq_len": 512, "page_size": page_size}
    session = eager_session(checkpoint, BuildOptions(dtype="float32", kv_policy=policy, **limits))
    engine = LLMEngine(session=session, num_pages=200)
    sets = KeptSets(engine)
    engine.add_request("prompt", prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
    engine.check_invariants()
    return {computed: kept for computed, kept in sets.of("prompt", 0).items() if computed <= len(prompt)}


def as_mask(kept: list[list[list[int]]], num_tokens: int) -> Tensor:
    mask = torch.zeros(len(kept), len(kept[0]), num_tokens, dtype=torch.bool)
    for owner, heads in enumerate(kept):
        for head, positions in enumerate(heads):
            mask[owner, head, positions] = True
    return mask


@pytest.mark.parametrize(("name", "run"), runs())
def test_the_engine_keeps_what_kvpress_keeps(name: str, run: Run, checkpoints: dict[str, Path]) -> None:
    case: Case = CASES[name]
    policy = policy_of(run)
    assert policy is not None
    found = evictions(checkpoints[name], policy, case.recipe.prompt_ids)
    if run.press == "keydiff-blocks":
        # kvpress computes the whole prompt first, so that only layer 0 has the keys of a cache that evicts; and it
        # evicts once more at the prompt's end.
        block = run.parameters["block_size"]
        first = int(run.num_kept[0, 0]) + block
        assert list(found) == list(range(first, case.num_tokens + 1, block))
        if (case.num_tokens - first) % block == 0:
            assert torch.equal(as_mask(found[case.num_tokens], case.num_tokens)[0], run.kept[0])
        return
    mask = as_mask(found[case.num_tokens], case.num_tokens)
    if run.press == "pyramid":  # its budgets are rounded one by one
        assert ((mask.sum(-1) - run.num_kept).abs() <= 1).all()
        same = (mask.sum(-1) == run.num_kept).all(-1)
        assert same.sum() > 1 and torch.equal(mask[same], run.kept[same])
        return
    if run.press == "simlayer":  # a mean of whole tokens has no room for the last ones of one layer that is not lazy
        lazy = (run.num_kept == run.num_kept.min()).all(-1)
        assert torch.equal(mask[lazy], run.kept[lazy])
        assert (mask[~lazy].sum(-1) == case.num_tokens).all(-1).sum() >= (~lazy).sum() - 1
        assert (mask[~lazy].sum(-1) > case.num_tokens - len(mask)).all()
        return
    if run.press != "tova":
        assert torch.equal(mask, run.kept)
        return
    # kvpress protects the last token: where its own query does not choose it, it is there in place of another one.
    for ours, theirs in zip(mask, run.kept, strict=True):
        chosen = bool(ours[0, -1])
        assert (ours != theirs).sum(-1).tolist() == [0 if chosen else 2] * len(theirs)


def test_every_press_has_runs() -> None:
    counts = Counter(run.press for case in CASES.values() for run in case.runs if run.press in PRESSES)
    assert set(counts) == set(PRESSES)
    assert any(
        (case.num_tokens - int(run.num_kept[0, 0])) % run.parameters["block_size"] == 0
        for case in CASES.values()
        for run in case.of("keydiff-blocks")
    )
