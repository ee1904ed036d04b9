"""What a step runs, counted as operator calls inside the compiled graphs."""

from collections import Counter
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from kvforge.runtime import LLMEngine, SamplingParams
from tests.support.models.engines import SWIFTKV
from tests.support.models.shelf import EngineShelf


def operator_calls(engine: LLMEngine) -> Counter[str]:
    """Run one step; returns how often each kvforge operator was called."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        engine.step()
    return Counter({event.key: event.count for event in recorded.key_averages() if event.key.startswith("kvforge::")})


def new_engine(directory: Path, chunk: int) -> LLMEngine:
    return LLMEngine(directory, num_pages=32, max_num_tokens=chunk)


def test_prompt_chunks_before_the_last_run_nothing_of_upper(engines: EngineShelf) -> None:
    """5 layers cut at 2 with owners 0, 1, 2, 4: a chunk writes 4 caches and attends in 2 layers; the last chunk
    also attends in the 3 layers above the cut, for its one survivor."""
    engine = new_engine(engines.engine(SWIFTKV), chunk=16)
    engine.add_request("a", list(range(10, 50)), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    for _ in range(2):
        assert operator_calls(engine) == {"kvforge::rope_paged_kv_write": 4, "kvforge::paged_attention": 2}
    assert operator_calls(engine) == {"kvforge::rope_paged_kv_write": 4, "kvforge::paged_attention": 5}
    assert operator_calls(engine) == {"kvforge::rope_paged_kv_write": 4, "kvforge::paged_attention": 5}


def test_a_step_of_mixed_requests_runs_each_graph_once(engines: EngineShelf) -> None:
    engine = new_engine(engines.engine(SWIFTKV), chunk=32)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for name in ("a", "b", "c"):
        engine.add_request(name, [5, 6, 7], params)
    engine.step()
    engine.add_request("long", list(range(10, 60)), params)
    assert operator_calls(engine) == {"kvforge::rope_paged_kv_write": 4, "kvforge::paged_attention": 5}
