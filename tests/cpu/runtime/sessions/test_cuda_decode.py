"""The cuda session's staging and padding, on the CPU with a compiled CPU engine's graphs inside."""

import dataclasses
import gc
import itertools
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvforge.manifest import load_manifest
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.sessions import aot_package
from kvforge.runtime.sessions import cuda as cuda_session
from kvforge.runtime.sessions.cpu import CpuSession
from kvforge.runtime.sessions.cuda import CudaSession
from kvforge.runtime.sessions.cuda_decode import Capture, GraphRecorder, batch_bucket, is_one_each, width_bucket
from kvforge.runtime.sessions.cuda_staging import ALIGNMENT, StepBuffer
from kvforge.runtime.sessions.inputs import LowerStep
from kvforge.runtime.sessions.session import Session, load_session
from kvforge.runtime.step.batch import StepBatch
from tests.support.cuda.recorder import Recorder, Recording
from tests.support.models.engines import SWIFTKV
from tests.support.models.shelf import EngineShelf
from tests.support.rounding import assert_near, config_of, model_error
from tests.support.schedules.engine_schedules import random_plan, run_plan
from tests.support.sessions.simulated_device import SimulatedDevice

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cpu_session(engines: EngineShelf) -> CpuSession:
    path = engines.engine(SWIFTKV)
    session = load_session(Path(path), load_manifest(path))
    assert isinstance(session, CpuSession)
    return session


@pytest.fixture(scope="module")
def rounding(engines: EngineShelf) -> float:
    """Of the largest logit or element of the cache, of sequences of at most 5 pages of 8 tokens."""
    return model_error(config_of(engines.checkpoint(SWIFTKV)), 5 * 8)


def in_place(function: Callable[[], Tensor]) -> tuple[Recording, Tensor]:
    """As a ``Recorder``, with results where the function leaves them, as on a GPU."""
    result = function()
    return Recording(function, result), result


def padded(session: CpuSession, capture: Capture | None) -> CudaSession:
    return CudaSession(session.manifest, {}, {"lower": session._lower, "upper": session._upper}, CPU, capture)


def decode_step(num_seqs: int, page_size: int, seed: int) -> LowerStep:
    """A decode step of sequences of random lengths on distinct pages; page 0 has no owner."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 5 * page_size) for _ in range(num_seqs)]
    columns = max(-(-length // page_size) for length in lengths)
    table = 1 + torch.randperm(num_seqs * columns).view(num_seqs, columns).int()
    positions = torch.tensor(lengths).int() - 1
    slots = table[torch.arange(num_seqs), positions.long() // page_size] * page_size + positions % page_size
    ids, starts = torch.randint(3, 300, (num_seqs,)).int(), torch.arange(num_seqs + 1).int()
    return LowerStep(ids, positions, slots.int(), starts, torch.tensor(lengths).int(), table)


def run_step(session: CpuSession | CudaSession, step: LowerStep, pools: list) -> Tensor:
    hidden = session.lower(step, pools)
    count = hidden.shape[0]
    batch = StepBatch(step, torch.arange(count).int(), torch.arange(count + 1).int())
    return session.upper(batch.upper(hidden), pools)


def test_padding_changes_neither_logits_nor_cache(cpu_session: CpuSession, rounding: float) -> None:
    torch.manual_seed(0)
    recorder = Recorder()
    session = padded(cpu_session, recorder)
    page_size = session.manifest.page_size
    mine, other = session.allocate_pools(64), cpu_session.allocate_pools(64)
    for pool, copy in zip(mine, other, strict=True):
        for tensor, target in zip(pool, copy, strict=True):
            target.copy_(tensor.normal_())
    for seed, num_seqs in enumerate((1, 3, 5, 8, 9, 3, 1)):
        step = decode_step(num_seqs, page_size, seed)
        logits = run_step(session, step, mine)
        assert_near(logits, run_step(cpu_session, step, other), rounding)
        for pool, copy in zip(mine, other, strict=True):
            for tensor, expected in zip(pool, copy, strict=True):
                assert_near(tensor, expected, rounding)
    # Buckets of 1, 4, 8 and 16 sequences, one width.
    assert len(recorder.recordings) == 2 * 4 and all(r.num_replays for r in recorder.recordings)


def test_an_engine_on_it_gives_the_cpu_engines_tokens(cpu_session: CpuSession) -> None:
    recorder = Recorder()
    session = padded(cpu_session, recorder)
    for seed in range(3):
        plan = random_plan(seed, page_sizes=(session.manifest.page_size,), sampled=False)
        expected = run_plan(LLMEngine(session=cpu_session, **plan.limits), plan)
        assert run_plan(LLMEngine(session=session, **plan.limits), plan) == expected
    assert sum(recording.num_replays for recording in recorder.recordings) > 20


@pytest.mark.parametrize("kind", ["direct", "captured", "later"])
def test_an_engine_that_runs_ahead_gives_the_cpu_engines_tokens(cpu_session: CpuSession, kind: str) -> None:
    for seed in range(2):
        session: Session = padded(cpu_session, Recorder() if kind == "captured" else None)
        if kind == "later":
            session = SimulatedDevice(cpu_session, random.Random(seed))
        plan = random_plan(seed, page_sizes=(session.manifest.page_size,), sampled=False)
        for request in plan.requests:
            request.abort_at = None
        expected = run_plan(LLMEngine(session=cpu_session, **plan.limits), plan)
        assert run_plan(LLMEngine(session=session, async_scheduling=True, **plan.limits), plan) == expected


def test_rows_of_prompts_leave_the_steps_own_alone(cpu_session: CpuSession, rounding: float) -> None:
    """A prompt that comes a token at a time shares steps with another request, and the place of hidden states."""
    found = []
    for session in (cpu_session, padded(cpu_session, in_place)):
        engine = LLMEngine(session=session, num_pages=32, max_num_tokens=2, max_num_seqs=2)
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, return_logits=True)
        engine.add_request("first", [5, 6], greedy)
        engine.add_request("asks", list(range(20, 30)), dataclasses.replace(greedy, prompt_logprobs=2))
        outputs = [output for _ in iter(engine.has_unfinished, False) for output in engine.step()]
        rows = {name: [o.logits[0] for o in outputs if o.request_id == name and o.logits] for name in ("first", "asks")}
        found.append({name: torch.from_numpy(np.stack(logits)) for name, logits in rows.items()})
    for name, expected in found[0].items():
        assert_near(found[1][name], expected, rounding)


def test_other_pools_are_captured_anew(cpu_session: CpuSession) -> None:
    recorder = Recorder()
    session = padded(cpu_session, recorder)
    step = decode_step(2, session.manifest.page_size, 0)
    first, second = session.allocate_pools(16), session.allocate_pools(16)
    run_step(session, step, first)
    run_step(session, step, second)
    assert len(recorder.recordings) == 4
    # The same kernels on the same shapes.
    assert all(map(torch.equal, itertools.chain(*first), itertools.chain(*second)))


def test_other_pools_that_begin_at_the_same_address_are_captured_anew(cpu_session: CpuSession) -> None:
    """As when a cache of another size is allocated where the last one was."""
    recorder = Recorder()
    session = padded(cpu_session, recorder)
    step = decode_step(2, session.manifest.page_size, 0)
    first = session.allocate_pools(16)
    second = [first[0], *session.allocate_pools(16)[1:]]
    run_step(session, step, first)
    run_step(session, step, second)
    assert len(recorder.recordings) == 4
    # The same kernels on the same shapes.
    assert all(map(torch.equal, itertools.chain(*first), itertools.chain(*second)))


def test_graphs_of_all_sizes_share_the_memory_of_their_results(cpu_session: CpuSession, rounding: float) -> None:
    places: list[tuple[int, ...]] = []

    def capture(function: Callable[[], Tensor]) -> tuple[Recording, Tensor]:
        recording, result = in_place(function)
        places.append((result.data_ptr(), *result.shape))
        return recording, result

    session = CudaSession(
        cpu_session.manifest, {}, {"lower": cpu_session._lower, "upper": cpu_session._upper}, CPU, capture
    )
    pools = session.allocate_pools(64)
    for index, (num_seqs, inference) in enumerate(((5, True), (1, False), (3, False))):
        with torch.inference_mode(inference):
            step = decode_step(num_seqs, session.manifest.page_size, index)
            expected = run_step(cpu_session, step, pools)
            assert_near(run_step(session, step, pools), expected, rounding)
    assert [rows for _, rows, _ in places] == [8, 8, 1, 1, 4, 4]
    assert len({address for address, _, _ in places}) == 2


def test_kernels_that_packages_read_later_stay_as_long_as_the_session(
    monkeypatch: pytest.MonkeyPatch, cpu_session: CpuSession
) -> None:
    """A GPU kernel's file is read when the kernel first runs."""

    def load_package(path: Path, weights: dict[str, Tensor], single_threaded: bool) -> Path:
        kernel = Path(os.environ["TMPDIR"]) / f"{path.stem}.cubin"
        kernel.touch()
        return kernel

    class Session:
        def __init__(self, manifest: object, weights: object, graphs: dict[str, Path], *rest: object) -> None:
            self.graphs = graphs

    monkeypatch.setattr(aot_package, "load_package", load_package)
    monkeypatch.setattr(cuda_session, "CudaSession", Session)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    before = os.environ.get("TMPDIR")
    session: Any = cuda_session.make_session(Path("engine"), cpu_session.manifest, {})
    assert os.environ.get("TMPDIR") == before
    kernels = list(session.graphs.values())
    assert [kernel.name for kernel in kernels] == ["lower.cubin", "upper.cubin"]
    assert all(kernel.is_file() for kernel in kernels)
    del session
    gc.collect()
    assert not kernels[0].parent.exists()


def test_warm_up_captures_every_size_and_writes_nothing(cpu_session: CpuSession) -> None:
    recorder = Recorder()
    session = padded(cpu_session, recorder)
    pools = session.allocate_pools(16)
    session.warm_up(pools, 20, max_num_seqs=5)
    assert len(recorder.recordings) == 2 * len((1, 2, 4, 8))
    assert not any(tensor.any() for pool in pools for tensor in pool)
    run_step(session, decode_step(3, session.manifest.page_size, 0), pools)
    assert len(recorder.recordings) == 8


def test_a_memory_pool_of_graphs_is_not_used_again_once_they_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        pass

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

        def synchronize(self) -> None:
            pass

    used: list[tuple[int, int]] = []

    def record(graph: Graph, pool: tuple[int, int], capture_error_mode: str) -> AbstractContextManager[None]:
        used.append(pool)
        return nullcontext()

    handles = iter((0, n) for n in range(1, 9))
    for name, value in (("Stream", Stream), ("current_stream", Stream), ("stream", nullcontext)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    recorder = GraphRecorder()
    graphs = [recorder(lambda: torch.ones(1)) for _ in range(2)]
    graphs.clear()
    gc.collect()
    kept = [recorder(lambda: torch.ones(1)) for _ in range(2)]
    assert used == [(0, 1), (0, 1), (0, 2), (0, 2)] and len(kept) == 2


def test_no_survivors_means_no_logits(cpu_session: CpuSession) -> None:
    session = padded(cpu_session, None)
    step = decode_step(2, session.manifest.page_size, 0)
    pools = session.allocate_pools(16)
    nobody = StepBatch(step, torch.zeros(0).int(), torch.zeros(3).int()).upper(session.lower(step, pools))
    assert session.upper(nobody, pools).shape == (0, session.manifest.vocab_size)


def test_the_cache_takes_the_sessions_own_memory(cpu_session: CpuSession) -> None:
    session = padded(cpu_session, None)
    session.default_kv_cache_gib = lambda: 20 * session.manifest.page_bytes / 2**30  # type: ignore[method-assign]
    sized = LLMEngine(session=session, max_seq_len=20 * session.manifest.page_size)
    assert sized.config.num_pages == 20
    assert LLMEngine(session=session, num_pages=7, max_seq_len=8).config.num_pages == 7


def test_buckets() -> None:
    for most in (1, 5, 64, 100, 512):
        for count in range(1, most + 1):
            bucket = batch_bucket(count, most)
            assert bucket is not None and count <= bucket <= most and bucket <= max(2 * count, 16)
    assert batch_bucket(513, 1024) is None
    assert [width_bucket(n, 2000) for n in (1, 128, 129, 256, 1025, 2000)] == [128, 128, 256, 256, 2000, 2000]
    assert width_bucket(5, 12) == width_bucket(12, 12) == 12
    assert is_one_each(torch.tensor([0, 1, 2]), 2)
    assert not is_one_each(torch.tensor([0, 0, 2]), 2)
    assert not is_one_each(torch.tensor([0, 1, 3]), 3)


def test_staged_tensors_keep_their_places() -> None:
    buffer = StepBuffer(4 * ALIGNMENT, CPU)
    addresses = set()
    for value in range(5):
        first, second = torch.full((3,), value).int(), torch.full((2, 5), -value).int()
        staged = buffer.copy([first, second])
        assert torch.equal(staged[0], first) and torch.equal(staged[1], second)
        addresses.add(tuple(tensor.data_ptr() for tensor in staged))
    assert len(addresses) == 1
    assert staged[1].data_ptr() - staged[0].data_ptr() == 4 * ALIGNMENT


def test_limits_of_the_manifest_fit_the_buffers(cpu_session: CpuSession) -> None:
    """The largest step that the manifest allows is staged without error."""
    manifest = dataclasses.replace(cpu_session.manifest, max_num_seqs=3, max_num_tokens=40, max_seq_len=64)
    session = CudaSession(manifest, {}, {"lower": lambda x: x[:1], "upper": lambda x: x[:1]}, CPU)
    tokens, columns = torch.zeros(40).int(), 64 // manifest.page_size
    table = torch.zeros(3, columns).int()
    step = LowerStep(tokens, tokens, tokens, torch.zeros(4).int(), torch.zeros(3).int(), table)
    assert session.lower(step, []).shape == (40,)
