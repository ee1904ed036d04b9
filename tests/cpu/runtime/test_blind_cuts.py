"""Models with a blind cut: an engine's logits are the reference's, and its tokens do not depend on the schedule."""

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.compiler import BuildOptions
from kvforge.planning.sequence_memory import sequence_bytes
from kvforge.runtime import LLM, LLMEngine, SamplingParams, SpeculativeConfig
from kvforge.runtime.scoring.score import score
from kvforge.runtime.sessions.pools import device_bytes
from model_defs.reference import reference_logits
from tests.cpu.runtime.test_engine_properties import CountingSession, alone, short_plan
from tests.support.models.checkpoints import load_weights, make_blind, make_checkpoint
from tests.support.random_cases import Seeds
from tests.support.rounding import assert_near, model_error
from tests.support.schedules.engine_schedules import run_plan
from tests.support.sessions.eager import EagerSession, eager_session

PAGE = 8
PROMPTS = (1, 5, 15, 16, 17, 18, 33, 100)
NEW = 20

WINDOWS_BELOW = {"sliding_window": 10, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}
GROWTH = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48, "llama_4_scaling_beta": 0.4}

MODELS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "llama, cut low": ("llama", 1, 1, {"num_key_value_heads": 1}),
    "llama, cut high": ("llama", 3, 1, {"head_dim": 80}),
    "llama, groups": ("llama", 2, 2, {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "qwen2, one group": ("qwen2", 1, 3, {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen3": ("qwen3", 2, 1, {"head_dim": 24, "num_key_value_heads": 4}),
    "olmo2, norms after": ("olmo2", 2, 2, {"num_attention_heads": 6}),
    "olmo3, windows below": ("olmo3", 2, 1, WINDOWS_BELOW),
    "smollm3, layers without rotation": ("smollm3", 2, 2, {"num_hidden_layers": 5}),
    "gpt_oss, sinks and experts": ("gpt_oss", 2, 1, {**WINDOWS_BELOW, "swiglu_limit": 0.7}),
    "granite, multipliers": ("granite", 1, 2, {"attention_bias": True}),
    "ministral3, growing queries": ("ministral3", 2, 1, {"rope_parameters": {"rope_theta": 1e4, **GROWTH}}),
}
"""Family, cut, layers of a group and config.json."""

CACHES = {
    "fp32": BuildOptions(kv_dtype="auto"),
    "fp8": BuildOptions(kv_dtype="fp8"),
    "int8": BuildOptions(kv_dtype="int8"),
    "bf16": BuildOptions(dtype="bfloat16"),
    "int4": BuildOptions(dtype="bfloat16", kv_dtype="int4"),
    "k8v4": BuildOptions(dtype="bfloat16", kv_dtype="k8v4"),
    "int8 weights": BuildOptions(dtype="bfloat16", weight_dtype="int8", calibration="none"),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def checkpoint(path: Path, case: str, num_anchors: int = 2 * PAGE) -> Path:
    family, cut, group_size, model = MODELS[case]
    return make_blind(make_checkpoint(path / "model", family, **model), cut, num_anchors, group_size)


def session_of(path: Path, options: BuildOptions = CACHES["fp32"]) -> EagerSession:
    return eager_session(path, dataclasses.replace(options, page_size=PAGE, max_num_tokens=256, max_draft_len=4))


def generated(engine: LLMEngine, prompt: list[int], **params: Any) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of a prompt and the logits behind each."""
    asked = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, return_logits=True, **params)
    engine.add_request("one", prompt, asked)
    tokens, logits = [], []
    while engine.has_unfinished():
        for output in engine.step():
            tokens += output.new_token_ids
            logits += map(torch.from_numpy, output.logits or ())
        engine.check_invariants()
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("case", MODELS)
def test_logits_are_the_references(case: str, tmp_path: Path) -> None:
    """For prompts that end within anchors, at their end and behind it, in one chunk and in many."""
    path = checkpoint(tmp_path, case)
    session, weights = session_of(path), load_weights(path)
    config = read_model_config(open_model(path))
    generator = torch.Generator().manual_seed(3)
    for length in PROMPTS:
        prompt = torch.randint(3, config.vocab_size, (length,), generator=generator).tolist()
        for chunk in (256, 7, 1):
            engine = LLMEngine(session=session, num_pages=32, max_num_tokens=chunk)
            tokens, logits = generated(engine, prompt)
            ids = torch.tensor([*prompt, *tokens])
            expected = reference_logits(config, weights, ids, num_prompt_tokens=length)[length - 1 : -1]
            assert_near(logits, expected, model_error(config, len(ids)), (length, chunk))


def test_what_is_hidden_is_not_seen(tmp_path: Path) -> None:
    """The cut matters: seen whole by the layers above, or with fewer anchors, a prompt gives other logits."""
    path = checkpoint(tmp_path, "llama, cut low")
    config, weights = read_model_config(open_model(path)), load_weights(path)
    ids = torch.arange(3, 103)
    blind = reference_logits(config, weights, ids, num_prompt_tokens=100)[-1]
    whole = reference_logits(config.first_layers(config.num_layers), weights, ids)[-1]
    fewer = dataclasses.replace(config, num_anchors=PAGE)
    bound = 100 * model_error(config, 100) * float(blind.abs().max())
    assert float((blind - whole).abs().max()) > bound
    assert float((blind - reference_logits(fewer, weights, ids, num_prompt_tokens=100)[-1]).abs().max()) > bound
    prompt_of_16 = reference_logits(config, weights, ids, num_prompt_tokens=2 * PAGE + 1)[-1]
    assert_near(prompt_of_16, whole, model_error(config, 100))


def compare(session: EagerSession, schedules: list[int], drafts: str | None = None) -> Counter[str]:
    """Run schedules whose upper pages are as few as they may be, or some more; every token is that of its sequence
    alone. Returns counts of what happened."""
    lonely, counts = LLMEngine(session=session, num_pages=16, enable_prefix_cache=False), Counter[str]()
    for seed in schedules:
        plan, rng = short_plan(seed), random.Random(seed)
        longest = max(len(request.prompt) + request.params.max_tokens for request in plan.requests)
        counted = CountingSession(session)
        counted.verify = session.verify
        engine = LLMEngine(
            session=counted,
            **plan.limits,
            num_upper_pages=min(-(-longest // PAGE) + rng.choice([0, 0, 1, 3, 12]), plan.num_pages),
            enable_prefix_cache=plan.enable_prefix_cache,
            speculative=None if drafts is None else SpeculativeConfig(drafts, 3, prompt_lookup_min=1),
        )
        upper = engine.scheduler.upper_pages.pool
        random.Random(seed).shuffle(upper.free_pages)
        tokens, reasons, aborted = run_plan(engine, plan)
        stats = engine.stats()
        assert stats["num_used_pages"] == 0 and stats["num_free_pages"] == plan.num_pages
        assert upper.num_used == 0 and upper.num_available == upper.num_pages
        assert stats["num_failed_steps"] == 0
        counts.update(
            preemptions=stats["num_preemptions"],
            reused=stats["num_reused_tokens"],
            aborted=len(aborted),
            skipped=counted.calls["lower"] - counted.calls["upper"],
            drafts=stats["num_draft_tokens"],
            accepted=stats["num_accepted_draft_tokens"],
        )
        for request in plan.requests:
            expected, reason, _ = alone(lonely, request)
            for index in range(request.params.n):
                key = (request.request_id, index)
                got = tokens.get(key, [])
                counts["sequences"] += 1
                if request.request_id in aborted:
                    assert got == expected[: len(got)], (seed, key)
                else:
                    assert (got, reasons[key]) == (expected, reason), (seed, key)
    return counts


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_equal_one_at_a_time(cache: str, tmp_path: Path, seeds: Seeds) -> None:
    """In small pools, chunks and batches, with and without shared prefixes, preempted and aborted."""
    session = session_of(checkpoint(tmp_path, "llama, groups", PAGE), CACHES[cache])
    counts = compare(session, schedules := seeds(40, 200))
    assert counts["sequences"] > 4 * len(schedules)
    assert min(counts[name] for name in ("preemptions", "reused", "aborted", "skipped")) > len(schedules) // 60, counts


@pytest.mark.parametrize("drafts", ["ngram", "suffix"])
def test_drafts_change_no_token(drafts: str, tmp_path: Path, seeds: Seeds) -> None:
    """Several survivors of a sequence in a step see each other in their order above the cut too."""
    session = session_of(checkpoint(tmp_path, "qwen3"))
    counts = compare(session, schedules := seeds(40, 200), drafts)
    assert min(counts["accepted"], counts["drafts"] - counts["accepted"]) > len(schedules) // 20, counts


@pytest.mark.parametrize("case", ["qwen3", "states of linear attention"])
def test_scores_are_the_references(case: str, tmp_path: Path) -> None:
    """Of continuations whose contexts begin alike, in chunks, with prefixes that are kept and without."""
    path = checkpoint(tmp_path, case) if case in MODELS else make_checkpoint(tmp_path / "model", "qwen3_5_text")
    session, weights = session_of(path), load_weights(path)
    config = read_model_config(open_model(path))
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(3, config.vocab_size, (60,), generator=generator).tolist()
    sizes = [(1, 30), (12, 9), (17, 20), (40, 1), (60, 25), (60, 12)]
    requests = [
        (shared[:size], torch.randint(3, config.vocab_size, (count,), generator=generator).tolist())
        for size, count in sizes
    ]
    for chunk, keep in ((256, True), (11, True), (7, False)):
        kept = {"num_snapshots": 8, "snapshot_every": 1} if keep else {}
        more = {"num_upper_pages": 8} if case in MODELS else kept
        llm = LLM(session=session, num_pages=24, max_num_tokens=chunk, enable_prefix_cache=keep, **more)
        for (context, continuation), found in zip(requests, score(llm, requests), strict=True):
            ids = torch.tensor([*context, *continuation])
            logits = reference_logits(config, weights, ids, num_prompt_tokens=len(context))[len(context) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
            assert_near(found.logprobs, expected, model_error(config, len(ids)), (len(context), chunk))
        llm.engine.check_invariants()
        assert llm.engine.scheduler.upper_pages.pool.num_used == 0


def test_bytes_allocated_are_those_of_both_pools(tmp_path: Path) -> None:
    session = session_of(checkpoint(tmp_path, "llama, groups"))
    manifest = session.manifest
    engine = LLMEngine(session=session, num_pages=40, num_upper_pages=12)
    per_owner = PAGE * 2 * manifest.model.kv_dim * 4
    assert (manifest.page_bytes, manifest.upper_page_bytes) == (2 * per_owner, 2 * per_owner)
    assert device_bytes(manifest, engine.runner.pools) == 40 * manifest.page_bytes + 12 * manifest.upper_page_bytes
    assert engine.stats()["kv_device_bytes"] == device_bytes(manifest, engine.runner.pools)
    of_prompt = 64 * manifest.page_bytes + 3 * manifest.upper_page_bytes  # 16 anchors and the last of 512 tokens
    assert sequence_bytes(manifest)["sequence_device_bytes"] == of_prompt
