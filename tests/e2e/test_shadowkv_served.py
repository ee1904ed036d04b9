"""A server with ShadowKV: the answers of the engine offline, and both memories of its cache on the metrics port."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import LLM
from kvforge.runtime import SamplingParams
from kvforge.serving.health.probe import read_metrics
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.models.engines import SHADOWKV
from tests.support.models.shelf import EngineShelf
from tests.support.serving.server import ask, started, text_of, wait_until

KV_CACHE_GIB = 0.02
SHORT, LONG = "one two three", " ".join(["one two three four five six seven"] * 12)
NUM_TOKENS = 100


@pytest.fixture(scope="module")
def engine(engines: EngineShelf) -> Path:
    return engines.engine(SHADOWKV)


@pytest.fixture(scope="module")
def shadow_server(engine: Path) -> Iterator[TritonServer]:
    with started(TritonServer(engine, ServerOptions(kv_cache_gib=KV_CACHE_GIB))) as running:
        yield running


def cache_bytes(server: TritonServer, family: str) -> dict[str, float]:
    """Bytes by memory."""
    samples = read_metrics(server.metrics_url)
    names = {memory: f'memory="{memory}"' for memory in ("device", "host")}
    return {
        memory: next(value for name, value in samples.items() if name.startswith(f"{family}{{") and label in name)
        for memory, label in names.items()
    }


def test_answers_and_bytes_of_both_memories(engine: Path, shadow_server: TritonServer) -> None:
    llm = LLM(engine, kv_cache_gib=KV_CACHE_GIB)
    assert llm.engine.manifest.policy.is_factored(len(llm.engine.tokenizer.encode(LONG)))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = {prompt: llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text for prompt in (SHORT, LONG)}
    stats, answers = llm.engine.stats(), {}

    def one(prompt: str) -> None:
        answers[prompt] = text_of(shadow_server, ask("ensemble", prompt, NUM_TOKENS, end_id=-1))

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == expected
    allocated = {"device": stats["kv_device_bytes"], "host": stats["kv_host_bytes"]}
    assert allocated["host"] > 0 and cache_bytes(shadow_server, "kvforge_kv_cache_bytes") == allocated
    wait_until(lambda: set(cache_bytes(shadow_server, "kvforge_kv_cache_used_bytes").values()) == {0.0}, "bytes in use")
