"""Every rule in an engine against the float64 oracle: first the tokens that each KV head keeps, then the logits."""

import functools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from kvforge.compiler import BuildOptions
from kvforge.runtime import LLMEngine
from tests.support.eviction.calendar import WHEN
from tests.support.eviction.cases import CUT_MODELS, PLAIN_MODELS, Case, random_case, write_model
from tests.support.eviction.forced import run_forced
from tests.support.random_cases import Seeds
from tests.support.rounding import assert_near, model_error
from tests.support.sessions.eager import eager_session

pytestmark = pytest.mark.usefixtures("one_thread")
NEAR_TIE = 1e-4
"""Relative, of scores: 800 roundings of float32; no score sums more than 150 weights, each of sums of 64 products."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: (folder / name, *write_model(name, folder / name)) for name in PLAIN_MODELS | CUT_MODELS}


def policy_of(case: Case) -> str:
    parameters = {"budget": case.budget, "block": case.block, **case.parameters}
    return f"{case.rule}:" + ",".join(f"{name}={value}" for name, value in parameters.items())


@functools.cache
def session_of(checkpoint: Path, policy: str, page_size: int):
    limits = {"max_num_seqs": 4, "max_num_tokens": 48, "max_seq_len": 256, "page_size": page_size}
    return eager_session(checkpoint, BuildOptions(dtype="float32", kv_policy=policy, **limits))


@pytest.mark.parametrize("rule", sorted(WHEN))
def test_kept_tokens_and_logits_equal_the_oracles(checkpoints: dict[str, tuple], rule: str, seeds: Seeds) -> None:
    counts: Counter[str] = Counter()
    cases = seeds(10, 100)
    for seed in cases:
        case = random_case(seed, rule)
        rng = random.Random(seed)
        path, config, weights = checkpoints[case.model]
        trace = case.trace(config, weights)
        session = session_of(path, policy_of(case), case.page_size)
        engine = LLMEngine(session=session, num_pages=400, max_num_tokens=rng.choice((1, 5, 16, 48)))
        kept, logits = run_forced(engine, case.prompt_ids, case.forced_ids)
        certain = trace.certain(NEAR_TIE)
        assert list(kept) == [eviction.computed for eviction in trace.evictions] == [p for p, _ in case.calendar]
        for eviction in certain:
            lanes = eviction.lanes
            for index, owner in enumerate(config.owners):
                for head in range(config.num_kv_heads):
                    found = kept[eviction.computed][index][head]
                    assert found == list(lanes[owner, head].kept), (seed, case, eviction.computed, owner, head)
        counts.update(evictions=len(certain), skipped=len(trace.evictions) - len(certain), cases=1)
        if len(certain) == len(trace.evictions):
            length = len(case.prompt_ids) + len(case.forced_ids)
            assert_near(torch.from_numpy(logits), trace.logits.float(), model_error(config, length))
            counts["logits"] += 1
    print(counts)
    assert counts["evictions"] >= len(cases) // 6 and counts["logits"] >= len(cases) // 8, counts
