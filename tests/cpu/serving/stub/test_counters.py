"""Counters go on past 2^31 and 2^63: engine, its messages, metrics, responses and keys."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from kvforge.kv_policies import Full
from kvforge.runtime import LLMEngine, SamplingParams, SequenceOutput
from kvforge.runtime.requests.sequence import RequestMetrics
from kvforge.serving.contract.request import GenerationRequest
from kvforge.serving.contract.stream_keys import StreamKeys
from kvforge.serving.engine.output_rows import from_row, to_row
from kvforge.serving.stub.active import ActiveRequest
from kvforge.serving.stub.metrics import EngineMetrics
from kvforge.serving.stub.responses import PERF_METRICS, chunk_arrays
from tests.cpu.serving.stub.test_metrics import FakeTriton
from tests.support.sessions.fake import FakeSession

EDGES = [2**31 - 1, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1]


def run(engine: LLMEngine) -> dict[str, list[int]]:
    """The tokens of eight requests of a few kinds, on few pages, so that some are preempted."""
    tokens: dict[str, list[int]] = {}
    for index in range(8):
        params = SamplingParams(
            max_tokens=30,
            seed=index,
            ignore_eos=True,
            temperature=index % 2,
            deadline_s=1e6,
            repetition_penalty=1.1,
            draft_token_ids=[5, 6],
        )
        engine.add_request(f"r{index}", [5, 6, 7, 8, index], params)
    while engine.has_unfinished():
        for output in engine.step():
            assert output.finish_reason in (None, "length")
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    engine.check_invariants()
    return tokens


def make_engine() -> LLMEngine:
    return LLMEngine(session=FakeSession(max_draft_len=4), num_pages=20)


def set_counters(engine: LLMEngine, edge: int) -> None:
    engine._arrivals = itertools.count(edge)
    engine._deadlines._num_added = edge
    stages = engine.scheduler.admissions, engine.scheduler.transitions
    for counted in (engine.statistics, engine.scheduler, *stages, engine.runner):
        for name, value in vars(counted).items():
            if name.lstrip("_").startswith("num_") and type(value) is int:
                setattr(counted, name, edge)
    for histogram in (value for value in vars(engine.statistics).values() if hasattr(value, "bounds")):
        histogram.counts = [edge] * len(histogram.counts)
        histogram.count, histogram.sum = edge, float(edge)


@pytest.mark.parametrize("edge", EDGES)
def test_an_engine_goes_on_past_the_edge(edge: int) -> None:
    engine, fresh = make_engine(), make_engine()
    set_counters(engine, edge)
    before = engine.stats()
    assert run(engine) == run(fresh)
    after, expected = json.loads(json.dumps(engine.stats())), fresh.stats()
    counted = ("num_generated_tokens", "num_preemptions", "num_reused_tokens", "num_iterations", "num_draft_tokens")
    for name in counted:
        assert before[name] == edge and expected[name] > 0, name
    assert after["num_generated_tokens"] == edge + expected["num_generated_tokens"] == edge + 240
    assert all(after[name] > edge for name in counted)
    assert after["histograms"]["e2e_s"]["count"] == edge + 8
    triton = FakeTriton()
    metrics = EngineMetrics(triton, "tensorrt_llm", "1", Full())
    for stats in ({**said, "timestamp_us": edge} for said in (before, after)):
        metrics._show_counters(stats)
        for gauge, read in metrics._gauges:
            gauge.show(read(stats))
    m = ("tensorrt_llm", "1")
    assert triton.value("kvforge_generated_tokens_total", *m) == float(after["num_generated_tokens"])
    assert triton.value("kvforge_request_seconds_count", *m) == float(edge + 8)
    assert triton.value("kvforge_request_seconds_bucket", "+Inf", *m) == float(
        sum(after["histograms"]["e2e_s"]["counts"])
    )
    metrics.close()


@pytest.mark.parametrize("edge", EDGES)
def test_a_request_whose_counts_are_past_the_edge_is_answered(edge: int) -> None:
    """Numbers that the contract's int32 does not hold are the largest that it holds."""
    metrics = RequestMetrics(1, 2, 3, 4, 5, 6, 7, 8, edge, edge, edge + 1, edge, edge, edge)
    row = json.loads(json.dumps(to_row(SequenceOutput("9.0", 0, [4], None, True, "length", None, metrics), [], 0)))
    prompt = GenerationRequest([1], False, True, return_perf_metrics=True, params={"max_tokens": 1})
    active = ActiveRequest(9, "id", None, [prompt], frozenset(PERF_METRICS))
    active.add(from_row(row, b""))
    (chunk,) = active.take()
    arrays = chunk_arrays(active, chunk)
    assert set(arrays) == set(PERF_METRICS)
    for name, (field, dtype) in PERF_METRICS.items():
        value = getattr(metrics, field)
        assert arrays[name].dtype == dtype
        assert arrays[name].item() == min(value, np.iinfo(dtype).max), name


def test_keys_begin_anew_after_the_last(tmp_path: Path) -> None:
    for lane in (0, 1):
        keys = StreamKeys(tmp_path, lane)
        for start in (2**29 - 2, 2**31 - 1, 2**63 - 1):
            keys._counter = itertools.count(start)
            made = [keys.make() for _ in range(4)]
            assert len(set(made)) == 4 and all(keys.is_valid(key) and 0 <= key < 2**62 for key in made)
            assert {key >> 61 for key in made} == {lane}
