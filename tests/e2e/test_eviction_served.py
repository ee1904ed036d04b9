"""A server with eviction: prompts longer than its pool, the answers of the engine offline, evictions as metrics."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import pytest

from kvforge import LLM
from kvforge.runtime import SamplingParams
from kvforge.serving.client import StreamingClient
from kvforge.serving.health.probe import read_metrics
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.models.engines import EVICTING
from tests.support.models.shelf import EngineShelf
from tests.support.serving.server import ENDLESS, ask, started, streamed, used_pages, wait_until

KV_CACHE_GIB = 0.0002
LENGTHS = (400, 20, 350, 130, 384, 90)
PROMPTS = [[3 + (7 * seed + place * place) % 90 for place in range(length)] for seed, length in enumerate(LENGTHS)]
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def engine(engines: EngineShelf) -> Path:
    return engines.engine(EVICTING)


@pytest.fixture(scope="module")
def evicting_server(engine: Path) -> Iterator[TritonServer]:
    with started(TritonServer(engine, ServerOptions(kv_cache_gib=KV_CACHE_GIB))) as running:
        yield running


def counted(server: TritonServer) -> dict[str, float]:
    samples = read_metrics(server.metrics_url)
    return {
        name: sum(value for sample, value in samples.items() if sample.startswith(f"kvforge_batchmax_{name}_total"))
        for name in ("evictions", "evicted_tokens")
    }


def test_prompts_longer_than_the_pool_are_answered_as_offline(engine: Path, evicting_server: TritonServer) -> None:
    offline = LLM(engine, kv_cache_gib=KV_CACHE_GIB)
    assert offline.engine.scheduler.pool.num_pages * EVICTING.options.page_size < max(LENGTHS)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in offline.generate(PROMPTS, params, use_tqdm=False)]
    before = counted(evicting_server)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(streamed, repeat(evicting_server), PROMPTS, repeat(NUM_TOKENS)))
    assert answers == [list(tokens) for tokens in expected]

    stats = offline.engine.stats()
    wait_until(
        lambda: counted(evicting_server)["evicted_tokens"] - before["evicted_tokens"] >= stats["num_evicted_tokens"],
        "evictions counted",
    )
    after = counted(evicting_server)
    # Of each sequence the same, unless it was preempted and computed again.
    assert after["evictions"] - before["evictions"] >= stats["num_evictions"] > len(PROMPTS)
    wait_until(lambda: used_pages(evicting_server) == 0, "pages given back")


def test_cancelled_sequences_give_back_what_evictions_left_them(evicting_server: TritonServer) -> None:
    with StreamingClient(evicting_server.grpc_url) as client:
        responses = client.generate("tensorrt_llm", ask("tensorrt_llm", PROMPTS[0][:100], ENDLESS))
        for _ in range(30):
            next(responses)
        wait_until(lambda: used_pages(evicting_server) > 0, "pages in use")
        responses.close()
    wait_until(lambda: used_pages(evicting_server) == 0, "pages given back")
