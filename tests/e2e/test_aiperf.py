"""AIPerf against the running server and a gateway in front of it, where it is at hand."""

import pytest

from kvforge.manifest import TOKENIZER_DIR
from kvforge.serving.server.launcher import TritonServer
from perf.serving.load.aiperf import VERSION, aiperf_at_hand, generate_stream, openai, run_aiperf
from perf.serving.load.gateway import run_gateway

INPUT_TOKENS, OUTPUT_TOKENS, NUM_REQUESTS = 32, 8, 6


@pytest.mark.parametrize("endpoint", ["generate_stream", "completions", "chat"])
def test_aiperf_gets_every_answer(server: TritonServer, endpoint: str) -> None:
    if aiperf_at_hand() is None:
        pytest.skip(f"AIPerf {VERSION} is not here; python -m perf.serving.run_aiperf installs it")
    with run_gateway(server) as gateway:
        target = (
            generate_stream(server.http_url)
            if endpoint == "generate_stream"
            else openai(gateway.url, gateway.model, endpoint)
        )
        numbers = run_aiperf(
            target, server.engine_dir / TOKENIZER_DIR, 2, NUM_REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS, timeout_s=300
        )
    assert numbers["num_requests"] == NUM_REQUESTS and numbers["num_failed"] == 0
    assert 0 < numbers["ttft_ms"]["p50"] <= numbers["end_to_end_ms"]["p50"]
