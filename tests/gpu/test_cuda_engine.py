"""Engines of target cuda against engines of target cpu from the same checkpoints."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvforge.common.errors import EngineError
from kvforge.compiler import BuildOptions
from kvforge.manifest import load_manifest
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.sessions.cuda import CudaSession, check_gpu
from kvforge.runtime.sessions.inputs import LowerStep, UpperStep, VerifyStep
from kvforge.runtime.sessions.session import Session
from tests.support.cuda.sessions import on, session_on
from tests.support.models.engines import EngineSpec
from tests.support.models.shelf import EngineShelf
from tests.support.rounding import assert_near, relative_error
from tests.support.schedules.engine_schedules import random_plan, run_plan
from tests.support.schedules.step_driver import StepDriver

OPTIONS = BuildOptions(page_size=8, max_num_tokens=256, max_draft_len=2)
FP32 = EngineSpec("llama", cut=2, group_size=2, model=(("num_hidden_layers", 5),), options=OPTIONS)
BF16_FP8 = dataclasses.replace(
    FP32,
    bfloat16=True,
    model=(("head_dim", 64), ("num_hidden_layers", 5)),
    options=dataclasses.replace(OPTIONS, kv_dtype="fp8", max_draft_len=0),
)
FP32_INT8 = dataclasses.replace(FP32, options=dataclasses.replace(OPTIONS, kv_dtype="int8", max_draft_len=0))
BF16_INT4 = dataclasses.replace(BF16_FP8, options=dataclasses.replace(BF16_FP8.options, kv_dtype="int4"))
TOLERANCE = {FP32: 1e-4, BF16_FP8: 6e-2, FP32_INT8: 1e-2, BF16_INT4: 2e-1}
"""Largest logit difference between the targets, relative to the largest logit; caches of 8 and 4 bits may round an
element to its neighbour."""
QWEN3 = EngineSpec("qwen3", model=(("num_hidden_layers", 3),), options=dataclasses.replace(OPTIONS, max_draft_len=0))
PROMPT, DECODED = 90, 20


def logits(session: Session, chunk: int, num_pages: int = 20) -> Tensor:
    """Logits of every position: a prompt in chunks, then one token a step (the CUDA graphs' case)."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, session.manifest.vocab_size, (PROMPT + DECODED,), generator=generator).tolist()
    driver = StepDriver(session, num_pages, seed=chunk)
    steps = [tokens[start : min(start + chunk, PROMPT)] for start in range(0, PROMPT, chunk)]
    return torch.cat([driver.run(step) for step in steps + [[token] for token in tokens[PROMPT:]]])


@pytest.mark.parametrize("spec", TOLERANCE, ids=lambda spec: f"{spec.family}, {spec.options.kv_dtype} cache")
def test_logits_equal_the_cpu_engines(spec: EngineSpec, engines: EngineShelf, gpu: torch.device) -> None:
    expected = logits(session_on(engines, spec, "cpu"), PROMPT)
    for chunk in (17, PROMPT):
        actual = logits(session_on(engines, spec, "cuda"), chunk)
        difference = relative_error(actual, expected)
        print(f"chunk {chunk}: {difference:.1e}")
        assert difference < TOLERANCE[spec], chunk


def test_norms_of_heads_equal_the_cpu_engines(engines: EngineShelf, gpu: torch.device) -> None:
    expected, actual = (logits(session_on(engines, QWEN3, target), 17) for target in ("cpu", "cuda"))
    assert relative_error(actual, expected) < TOLERANCE[FP32]


def test_schedules_give_the_cpu_engines_tokens(engines: EngineShelf, gpu: torch.device) -> None:
    """Arrivals, chunks, preemptions, prefix hits and aborts, greedy in fp32."""
    cuda, cpu = session_on(engines, FP32, "cuda"), session_on(engines, FP32, "cpu")
    for seed in range(6):
        plan = random_plan(seed, page_sizes=(OPTIONS.page_size,), sampled=False)
        expected = run_plan(LLMEngine(session=cpu, **plan.limits), plan)
        assert run_plan(LLMEngine(session=cuda, **plan.limits), plan) == expected, seed


def test_steps_planned_ahead_wait_for_token_ids_alone(engines: EngineShelf, gpu: torch.device) -> None:
    """And give the tokens of steps one after the other."""
    cuda = session_on(engines, FP32, "cuda")
    for seed in range(6):
        plan = random_plan(seed, page_sizes=(OPTIONS.page_size,), sampled=False)
        for request in plan.requests:
            request.abort_at = None
        expected = run_plan(LLMEngine(session=cuda, **plan.limits), plan)
        assert run_plan(LLMEngine(session=cuda, async_scheduling=True, **plan.limits), plan) == expected, seed
    engine = LLMEngine(session=cuda, num_pages=40, async_scheduling=True)
    for name, sampling in (("greedy", {"temperature": 0.0}), ("drawn", {"temperature": 1.0, "top_p": 0.9, "seed": 1})):
        engine.add_request(name, [5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True, **sampling))
    for _ in range(20):  # until its graphs are captured
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.stats()["num_failed_steps"] == 0 and len(engine.requests) == 2


def test_prompts_come_back_from_main_memory_and_files(engines: EngineShelf, gpu: torch.device, tmp_path: Path) -> None:
    """Twice on one engine whose pool forgets everything in between; the tokens are those without a tier."""
    cuda, num_read = session_on(engines, FP32, "cuda"), 0
    for seed in range(6):
        plan = random_plan(seed, page_sizes=(OPTIONS.page_size,), sampled=False)
        expected = run_plan(LLMEngine(session=cuda, **plan.limits), plan)
        below = {"prefix_dir": tmp_path / str(seed)} if seed % 2 else {}
        engine = LLMEngine(session=cuda, **plan.limits, prefix_host_gib=0.01, **below)
        assert run_plan(engine, plan) == expected, seed
        pool = engine.scheduler.pool
        for page in [pool.allocate() for _ in range(pool.num_available)]:
            pool.release(page, keep=False)
        assert run_plan(engine, plan) == expected, seed
        num_read += engine.stats()["num_stored_reused_tokens"]
        engine.close()
    assert num_read > 0


def test_captured_decode_equals_direct_decode(engines: EngineShelf, gpu: torch.device) -> None:
    captured = session_on(engines, FP32, "cuda")
    assert isinstance(captured, CudaSession)
    graphs = {"lower": captured._lower, "upper": captured._upper}
    direct = CudaSession(captured.manifest, captured._weights, graphs, gpu)
    plan = random_plan(3, page_sizes=(OPTIONS.page_size,), sampled=False, max_seqs=8)
    limits = {"num_pages": plan.num_pages, "max_num_tokens": 64, "max_num_seqs": plan.max_num_seqs}
    assert run_plan(LLMEngine(session=captured, **limits), plan) == run_plan(LLMEngine(session=direct, **limits), plan)
    assert_near(logits(captured, 30), logits(direct, 30), TOLERANCE[FP32])


def test_drafts_are_verified_as_on_the_cpu(engines: EngineShelf, gpu: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    starts, vocab = torch.tensor([0, 2, 2, 3]).int(), 320
    scores = torch.randn(6, vocab, generator=generator)
    drafts = torch.stack([scores[0].argmax(), scores[1].argmin(), scores[4].argmax()]).int()
    for num_probs in (0, 3):  # the exported graph must not have frozen whether there are any
        arguments = (
            scores,
            drafts,
            starts,
            torch.softmax(torch.randn(num_probs, vocab, generator=generator), -1),
            torch.tensor([0.0, 1.0, 0.7]),
            torch.rand(6, 2, generator=generator),
        )
        cuda, cpu = (session_on(engines, FP32, target).verify(VerifyStep(*arguments)) for target in ("cuda", "cpu"))
        assert [tensor.tolist() for tensor in cuda] == [tensor.tolist() for tensor in cpu]
        assert cuda[0][0] == 1


def test_the_early_exit_equals_the_cpus(engines: EngineShelf, gpu: torch.device) -> None:
    """After a prompt's chunk and after a captured decode step, before ``upper`` and after it."""
    spec = dataclasses.replace(FP32, early_exit=True)
    cuda, cpu = (session_on(engines, spec, target) for target in ("cuda", "cpu"))
    results = []
    for each in (cuda, cpu):
        pools, rows = each.allocate_pools(8), []
        for begin, end in ((0, 20), (20, 21)):
            ids, positions = torch.arange(begin + 3, end + 3).int(), torch.arange(begin, end).int()
            shared = (torch.tensor([end]).int(), torch.arange(8).int()[None])
            hidden = each.lower(
                LowerStep(ids, positions, positions, torch.tensor([0, end - begin]).int(), *shared), pools
            )
            last = torch.tensor([end - begin - 1]).int()
            rows.append(each.early_exit(hidden, last))
            rows.append(each.upper(UpperStep(hidden, last, torch.tensor([0, 1]).int(), positions, *shared), pools))
            rows.append(each.early_exit(hidden, last))
        results.append(torch.cat(rows))
    assert results[0].device.type == "cpu"
    assert relative_error(*results) < TOLERANCE[FP32]


def test_pools_and_their_size(engines: EngineShelf, gpu: torch.device) -> None:
    cuda = session_on(engines, BF16_FP8, "cuda")
    assert isinstance(cuda, CudaSession)
    pools = cuda.allocate_pools(10)
    assert all(tensor.device.type == "cuda" for pool in pools for tensor in pool)
    stored = sum(tensor.numel() * tensor.element_size() for pool in pools for tensor in pool)
    assert stored == 10 * cuda.manifest.page_bytes
    assert 0 < cuda.default_kv_cache_gib() * 2**30 < torch.cuda.mem_get_info()[0]


def test_another_gpu_is_refused(engines: EngineShelf, gpu: torch.device) -> None:
    manifest = dataclasses.replace(load_manifest(engines.engine(on(FP32, "cuda"))), isa=("sm_10",))
    with pytest.raises(EngineError, match="built for sm_10 and this GPU is sm_"):
        check_gpu(manifest, Path("engine"))
