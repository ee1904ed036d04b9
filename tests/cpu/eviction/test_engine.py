"""Eviction in engines: memory as it is said, prompts longer than the pool, all bits of full attention where nothing is
evicted, compiled graphs, caches of 8 bits."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from kvforge.common.errors import BuildError, EngineError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.compiler.options import ResolvedOptions, resolve
from kvforge.kv_policies import parse
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.sessions.pools import device_bytes
from tests.support.eviction.forced import run_forced
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.engines import EVICTING
from tests.support.models.shelf import EngineShelf
from tests.support.models.small_models import small_session
from tests.support.rounding import assert_near, config_of, model_error
from tests.support.sessions.eager import eager_session

pytestmark = pytest.mark.usefixtures("one_thread")
RULES = {
    "streaming": "streaming:sinks=2",
    "recent": "recent",
    "h2o": "h2o",
    "scissorhands": "scissorhands:recent=2",
    "tova": "tova",
    "snapkv": "snapkv:window=5",
    "adakv": "adakv:window=4",
    "pyramid": "pyramid:window=4,beta=4",
    "simlayer": "simlayer:sinks=2,recent=2",
    "fastgen": "fastgen:window=5,recover_percent=80",
    "kvzip": "kvzip:chunk=30,sinks=2",
    "keydiff+adakv": "keydiff+adakv",
    "squeeze": "squeeze:window=4,similar=6",
    "expected": "expected:window=6,sinks=2",
    "batchmax": "batchmax",
    "keydiff": "keydiff",
    "roco": "roco:sinks=2,spread=3",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PLAIN = {"head_dim": 10, "cut": 3, "num_layers": 3}


def with_budget(rule: str, budget: int) -> str:
    text = RULES[rule]
    return f"{text}{',' if ':' in text else ':'}budget={budget}"


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 96) for _ in range(length)]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("rule", RULES)
def test_a_budget_that_is_never_full_gives_the_bits_of_full_attention(
    rule: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of keys as they are: those of an int8 cache are rotated where no policy reads them."""
    monkeypatch.setattr(ResolvedOptions, "rotates_keys", False)
    prompt, forced = prompt_of(70), prompt_of(20, 1)
    logits = []
    for policy in ("full", with_budget(rule, 100)):
        engine = LLMEngine(session=small_session({"kv_policy": policy, "kv_dtype": kv_dtype}, **PLAIN), num_pages=32)
        logits.append(
            run_forced(engine, prompt, forced)[1] if policy != "full" else full_logits(engine, prompt, forced)
        )
    assert (logits[0] == logits[1]).all()


def full_logits(engine: LLMEngine, prompt: list[int], forced: list[int]):
    """As ``run_forced`` for an engine that evicts nothing."""
    given, rows = iter([*forced, 0]), []
    append = engine.scheduler.append
    engine.scheduler.append = lambda sequences, tokens: append(sequences, [next(given) for _ in sequences])  # type: ignore[method-assign]
    engine.add_request("r", prompt, dataclasses.replace(GREEDY, max_tokens=len(forced) + 1, return_logits=True))
    while engine.has_unfinished():
        for output in engine.step():
            rows += output.logits
    return np.stack(rows)


@pytest.mark.parametrize("rule", RULES)
def test_bytes_that_are_used_are_the_policys(rule: str) -> None:
    """Of one sequence, at every step: pages, state and slots as ``device_bytes`` says."""
    policy = parse(with_budget(rule, 20))
    session = small_session({"kv_policy": str(policy)}, **PLAIN)
    manifest, cache = session.manifest, session.manifest.owner_cache
    engine = LLMEngine(session=session, num_pages=32, max_num_seqs=1, max_num_tokens=8)
    stats = engine.stats()
    assert stats["kv_device_bytes"] == device_bytes(manifest, engine.runner.pools)
    prompt = prompt_of(50)
    engine.add_request("r", prompt, GREEDY)
    for _ in range(20):
        engine.step()
        sequence = engine.scheduler.running[0]
        if sequence.is_due:
            continue  # what goes is there until the next step
        computed = sequence.num_computed
        expected = policy.device_bytes(cache, len(prompt), computed - len(prompt))
        assert engine.stats()["kv_device_used_bytes"] == manifest.model.num_owners * expected, computed
    assert engine.stats()["num_evictions"] > 0
    lengths = len(prompt), sequence.num_computed
    cached = policy.calendar.cached_before(*lengths) if sequence.is_due else policy.num_cached(*lengths)
    evicted = sequence.num_computed - cached
    assert engine.stats()["num_evicted_tokens"] == evicted


@pytest.mark.parametrize("rule", ["streaming", "batchmax", "keydiff", "roco"])
def test_prompts_longer_than_the_pool(rule: str) -> None:
    session = small_session({"kv_policy": with_budget(rule, 16)}, **PLAIN)
    engine = LLMEngine(session=session, num_pages=4, max_num_tokens=8)
    engine.add_request("long", prompt_of(100), GREEDY)
    tokens, most = [], 0
    while engine.has_unfinished():
        for output in engine.step():
            tokens += output.new_token_ids
        most = max(most, engine.stats()["num_used_pages"])
        engine.check_invariants()
    assert len(tokens) == 20 and most == 4
    roomy = LLMEngine(session=session, num_pages=100)
    roomy.add_request("long", prompt_of(100), GREEDY)
    again = []
    while roomy.has_unfinished():
        again += [token for output in roomy.step() for token in output.new_token_ids]
    assert again == tokens


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("rule", RULES)
def test_8_bit_caches_keep_what_their_keys_say(rule: str, kv_dtype: str) -> None:
    """In another order of other pages: the same tokens stay, every bit of the logits is the same."""
    session = small_session({"kv_policy": with_budget(rule, 20), "kv_dtype": kv_dtype}, **PLAIN)
    prompt, forced = prompt_of(60), prompt_of(25, 1)
    results = []
    for pages in (40, 23):
        engine = LLMEngine(session=session, num_pages=pages, max_num_tokens=7)
        random.Random(pages).shuffle(engine.scheduler.pool.free_pages)
        results.append(run_forced(engine, prompt, forced))
    assert results[0][0] == results[1][0] and len(results[0][0]) > 0
    assert (results[0][1] == results[1][1]).all()


@pytest.mark.usefixtures("compiled_with_full")
@pytest.mark.parametrize("rule", ["streaming", "roco", "squeeze", "expected", "kvzip"])
def test_a_built_engine_does_what_its_graphs_do(rule: str, tmp_path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama", seed=5, num_hidden_layers=2)
    options = BuildOptions(
        dtype="float32",
        page_size=8,
        kv_policy=with_budget(rule, 32),
        max_num_seqs=4,
        max_num_tokens=64,
        max_seq_len=256,
    )
    build_engine(checkpoint, tmp_path / "engine", options)
    assert_does_what_its_graphs_do(tmp_path / "engine", checkpoint, options)


def test_a_compiled_engine_does_what_its_graphs_do(engines: EngineShelf) -> None:
    assert_does_what_its_graphs_do(engines.engine(EVICTING), engines.checkpoint(EVICTING), EVICTING.options)


def assert_does_what_its_graphs_do(directory: Path, checkpoint: Path, options: BuildOptions) -> None:
    """It keeps the same tokens as the graphs that torch runs, and has their logits."""
    prompt, forced = prompt_of(100), prompt_of(30, 1)
    results = [
        run_forced(engine, prompt, forced)
        for engine in (LLMEngine(directory), LLMEngine(session=eager_session(checkpoint, options)))
    ]
    assert results[0][0] == results[1][0] and len(results[0][0]) > 0
    got, want = (torch.from_numpy(logits) for _, logits in results)
    assert_near(got, want, model_error(config_of(checkpoint), 130))


def test_what_does_not_go_together_is_refused(tmp_path) -> None:
    config = small_session({}, head_dim=10).config
    for policy, more, words in (
        ("h2o", {}, "--kv-policy h2o needs the attention of every token"),
        (
            "snapkv",
            {"max_draft_len": 4},
            "--kv-policy snapkv needs one query per sequence and step, but with speculation",
        ),
    ):
        options = BuildOptions(max_num_tokens=64, max_num_seqs=4, max_seq_len=128, kv_policy=policy, **more)
        with pytest.raises(BuildError, match=words):
            resolve(options, config, "F32")
    session = small_session({"kv_policy": "snapkv:budget=40"}, head_dim=10, cut=1, early_exit=True)
    with pytest.raises(
        EngineError, match="snapkv observes the queries of all layers, which tokens that exit early do not"
    ):
        LLMEngine(session=session, early_exit_threshold=0.5)
