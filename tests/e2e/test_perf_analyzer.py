"""perf_analyzer against the running server, where it is at hand; ``--full`` fetches it."""

import shutil

import pytest

from kvforge.bench.traces import Goals
from kvforge.serving.server.launcher import TritonServer
from perf.serving.load.client import ask_text, ask_tokens
from perf.serving.load.perf_analyzer import SHA256, cached_program, run_perf_analyzer
from perf.serving.load.profile_export import read_traces, summarise

OUTPUT_TOKENS, NUM_REQUESTS = 8, 6
MORE = {"end_id": -1, "return_num_output_tokens": True}
REQUESTS = {
    "ensemble": [ask_text(f"number {i}", OUTPUT_TOKENS, **MORE) for i in range(NUM_REQUESTS)],
    "tensorrt_llm": [ask_tokens([5, 6 + i, 7], OUTPUT_TOKENS, **MORE) for i in range(NUM_REQUESTS)],
}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_every_request_gets_all_its_tokens(server: TritonServer, full: bool, model: str) -> None:
    if not (full or shutil.which("perf_analyzer") or cached_program().is_file()):
        pytest.skip(f"perf_analyzer ({SHA256[:8]}) is not here; --full fetches it")
    level = ["--concurrency-range", "2"]
    experiment = run_perf_analyzer(server.grpc_url, model, REQUESTS[model], level, NUM_REQUESTS, timeout_s=120)
    traces = read_traces(experiment)
    assert len(traces) == len(experiment["requests"]) == NUM_REQUESTS
    numbers = summarise(traces, NUM_REQUESTS, 3, OUTPUT_TOKENS, Goals())
    assert numbers["num_incomplete"] == 0 and numbers["good_fraction"] == 1.0
    assert 1.0 <= numbers["tokens_per_response"] <= OUTPUT_TOKENS
    assert 0 < numbers["ttft_s"]["p50"] <= numbers["end_to_end_s"]["p50"] <= numbers["seconds"]
