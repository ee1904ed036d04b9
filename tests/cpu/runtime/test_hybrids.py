"""Models with linear attention in most layers: tokens are transformers', and do not depend on the schedule."""

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.compiler import BuildOptions
from kvforge.runtime import LLM, LLMEngine, SamplingParams, SpeculativeConfig
from kvforge.runtime.scoring.score import score
from kvforge.runtime.sessions.session import Session
from kvforge.runtime.speculation.drafting import Drafting
from model_defs.reference import reference_logits
from tests.cpu.runtime.test_engine_properties import CountingSession, alone, load
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.models.engines import EngineSpec
from tests.support.models.logits import transformers_logits
from tests.support.models.shelf import EngineShelf
from tests.support.random_cases import Seeds
from tests.support.rounding import assert_near, model_error
from tests.support.schedules.drafters import AdversarialDrafter, RandomLengths
from tests.support.schedules.engine_schedules import check_tokens, random_plan, run_plan
from tests.support.sessions.eager import EagerSession, eager_session

PAGE, NEW = 8, 20
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {"num_hidden_layers": 4}),
    "qwen3_next, two of each": ("qwen3_next", {"num_hidden_layers": 4, "full_attention_interval": 2}),
    "qwen3_5": ("qwen3_5_text", {"num_hidden_layers": 5}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"num_hidden_layers": 4}),
    "lfm2": ("lfm2", {"num_hidden_layers": 4}),
}
OPTIONS = BuildOptions(page_size=PAGE, max_num_tokens=256, max_draft_len=4)
CACHES = {
    "fp32": BuildOptions(kv_dtype="auto"),
    "fp8": BuildOptions(kv_dtype="fp8"),
    "bf16": BuildOptions(dtype="bfloat16"),
    "int4": BuildOptions(dtype="bfloat16", kv_dtype="int4"),
    "int8 weights": BuildOptions(dtype="bfloat16", weight_dtype="int8", calibration="none"),
}
SCHEDULES: dict[str, Any] = dict(
    page_sizes=(PAGE,), vocab_size=320, max_prompt=40, max_new=32, max_requests=6, sampled=False
)
"""Answers so long that several sequences run out of pages."""

pytestmark = pytest.mark.usefixtures("one_thread")


def checkpoint(path: Path, case: str) -> Path:
    family, model = MODELS[case]
    return make_checkpoint(path / "model", family, **model)


def session_of(path: Path, options: BuildOptions = CACHES["fp32"]) -> EagerSession:
    limits = {name: getattr(OPTIONS, name) for name in ("page_size", "max_num_tokens", "max_draft_len")}
    return eager_session(path, dataclasses.replace(options, **limits))


def generated(engine: LLMEngine, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of a prompt and the logits behind each."""
    asked = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, return_logits=True)
    engine.add_request("one", prompt, asked)
    tokens, logits = [], []
    while engine.has_unfinished():
        for output in engine.step():
            tokens += output.new_token_ids
            logits += map(torch.from_numpy, output.logits or ())
        engine.check_invariants()
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("case", MODELS)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """In one chunk and in many, from the start and from a snapshot."""
    path = checkpoint(tmp_path, case)
    session, config = session_of(path), read_model_config(open_model(path))
    generator = torch.Generator().manual_seed(3)
    for length in (1, 2, 5, 8, 17, 33, 100):
        prompt = torch.randint(3, config.vocab_size, (length,), generator=generator).tolist()
        for chunk in (256, 7, 1):
            engine = LLMEngine(session=session, num_pages=32, max_num_tokens=chunk, snapshot_every=1, num_snapshots=30)
            for _ in range(2):
                tokens, logits = generated(engine, prompt)
                expected = transformers_logits(path, torch.tensor([*prompt, *tokens]))[length - 1 : -1]
                assert_near(logits, expected, model_error(config, length + NEW), (length, chunk))
                assert tokens == expected.argmax(-1).tolist(), (length, chunk)
            assert engine.stats()["num_reused_tokens"] == (length - 1) // PAGE * PAGE


@pytest.mark.parametrize("case", MODELS)
def test_bits_do_not_depend_on_chunks_and_snapshots(case: str, tmp_path: Path) -> None:
    session = session_of(checkpoint(tmp_path, case), CACHES["bf16"])
    prompt = torch.randint(3, 320, (75,), generator=torch.Generator().manual_seed(2)).tolist()
    found = []
    for chunk, every in ((256, 1), (16, 2), (7, 3), (1, 5)):
        engine = LLMEngine(session=session, num_pages=32, max_num_tokens=chunk, snapshot_every=every, num_snapshots=9)
        found += [generated(engine, prompt)[1] for _ in range(2)]
        assert engine.stats()["num_reused_tokens"] == 72
    assert all(torch.equal(logits, found[0]) for logits in found[1:])


def compare(session: Session, schedules: list[int], drafts: bool = False) -> Counter[str]:
    """Run schedules with few snapshots and many, and with drafts of which some are right; every token is that of its
    sequence alone. Returns counts of what happened."""
    lonely, counts = LLMEngine(session=session, num_pages=16, enable_prefix_cache=False), Counter[str]()
    for seed in schedules:
        plan, rng = random_plan(seed, **SCHEDULES), random.Random(seed)
        expected = {
            (request.request_id, index): alone(lonely, request)[:2]
            for request in plan.requests
            for index in range(request.params.n)
        }
        counted = CountingSession(session)
        counted.verify = session.verify  # type: ignore[method-assign]
        engine = LLMEngine(
            session=counted,
            **plan.limits,
            snapshot_every=rng.choice([1, 2, 5]),
            num_snapshots=rng.choice([1, 3, 20]),
            enable_prefix_cache=plan.enable_prefix_cache,
            speculative=SpeculativeConfig("ngram", 3) if drafts else None,
        )
        if isinstance(engine.drafting, Drafting):
            engine.drafting.drafter = AdversarialDrafter(rng, expected, session.manifest.vocab_size)
            engine.drafting._lengths = RandomLengths(rng, 3)
        random.Random(seed).shuffle(engine.scheduler.state_rows.free_rows)
        tokens, reasons, aborted = run_plan(engine, plan)
        stats = engine.stats()
        assert stats["num_used_pages"] == stats["num_used_state_rows"] == stats["num_failed_steps"] == 0
        counts.update(
            preemptions=stats["num_preemptions"],
            reused=stats["num_reused_tokens"],
            aborted=len(aborted),
            skipped=counted.calls["lower"] - counted.calls["upper"],
            drafts=stats["num_draft_tokens"],
            accepted=stats["num_accepted_draft_tokens"],
        )
        check_tokens(tokens, reasons, aborted, expected, seed)
        counts["sequences"] += len(expected)
    print(f"\n{len(schedules)} schedules, 0 differences: {dict(counts)}")
    return counts


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_equal_one_at_a_time(cache: str, tmp_path: Path, seeds: Seeds) -> None:
    """In small pools, chunks and batches, with and without shared prefixes, preempted and aborted."""
    counts = compare(session_of(checkpoint(tmp_path, "qwen3_next"), CACHES[cache]), schedules := seeds(16, 200))
    assert counts["sequences"] > 4 * len(schedules)
    assert min(counts[name] for name in ("preemptions", "reused", "aborted", "skipped")) > len(schedules) // 60, counts


def test_drafts_change_no_token(tmp_path: Path, seeds: Seeds) -> None:
    """The state behind the last draft that is accepted goes on."""
    counts = compare(session_of(checkpoint(tmp_path, "qwen3_5")), schedules := seeds(16, 200), True)
    assert min(counts["accepted"], counts["drafts"] - counts["accepted"]) > len(schedules) // 20, counts


def test_compiled_engines_give_the_same(engines: EngineShelf, full: bool, seeds: Seeds) -> None:
    if not full:
        pytest.skip("builds an engine; --full")
    spec = EngineSpec("qwen3_next", bfloat16=True, options=OPTIONS, model=(("num_hidden_layers", 4),))
    session = load(engines.engine(spec))
    compare(session.session, seeds(16, 200))
    compare(session.session, seeds(16, 200), True)


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    """Of continuations whose contexts begin alike, in chunks, from snapshots and without."""
    path = checkpoint(tmp_path, "qwen3_5")
    session, config = session_of(path), read_model_config(open_model(path))
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(3, config.vocab_size, (60,), generator=generator).tolist()
    sizes = [(1, 30), (12, 9), (17, 20), (40, 1), (60, 25), (60, 12)]
    requests = [
        (shared[:size], torch.randint(3, config.vocab_size, (count,), generator=generator).tolist())
        for size, count in sizes
    ]
    for chunk, every in ((256, 1), (11, 2), (7, 0)):
        llm = LLM(session=session, num_pages=32, max_num_tokens=chunk, snapshot_every=every)
        for (context, continuation), found in zip(requests, score(llm, requests), strict=True):
            logits = transformers_logits(path, torch.tensor([*context, *continuation]))[len(context) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
            assert_near(found.logprobs, expected, model_error(config, len(logits)), (len(context), chunk))
        llm.engine.check_invariants()


def test_log_probabilities_of_prompts_are_the_references(tmp_path: Path) -> None:
    """With them nothing of the prompt is reused."""
    path = checkpoint(tmp_path, "qwen3_next")
    config = read_model_config(open_model(path))
    llm = LLM(session=session_of(path), num_pages=32, max_num_tokens=9, snapshot_every=1)
    prompt = torch.randint(3, config.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
    expected = reference_logits(config, load_weights(path), prompt)[:-1].log_softmax(-1).gather(1, prompt[1:, None])
    for _ in range(2):
        output = llm.generate(prompt.tolist(), SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
        assert output.prompt_logprobs is not None
        found = torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:] if entry is not None])
        assert_near(found, expected[:, 0], model_error(config, len(prompt)), 0)
