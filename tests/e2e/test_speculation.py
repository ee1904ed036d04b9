"""A server that drafts: the answers of one that does not, in fewer steps, and what became of the drafts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import LLM
from kvforge.runtime import SamplingParams
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.serving.health.probe import read_metrics
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.cpu.gateway.http_calls import Answer, post
from tests.support.models.engines import SWIFTKV_FP8
from tests.support.models.shelf import EngineShelf
from tests.support.serving.server import ask, started, text_of, wait_until

KV_CACHE_GIB = 0.05
PROMPT = "one two three one two three one two"
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def drafting_engine(engines: EngineShelf) -> Path:
    return engines.engine(SWIFTKV_FP8)


@pytest.fixture(scope="module")
def drafting_server(drafting_engine: Path) -> Iterator[TritonServer]:
    config = SpeculativeConfig("ngram", SWIFTKV_FP8.options.max_draft_len, prompt_lookup_min=1)
    with started(
        TritonServer(drafting_engine, ServerOptions(kv_cache_gib=KV_CACHE_GIB, speculative=config))
    ) as running:
        yield running


def value(server: TritonServer, family: str, **labels: str) -> float:
    found = read_metrics(server.metrics_url)
    wanted = [f'{name}="{label}"' for name, label in labels.items()]
    (name,) = (n for n in found if n.startswith(f"{family}{{") and all(label in n for label in wanted))
    return found[name]


def test_answers_acceptance_and_bytes(drafting_engine: Path, drafting_server: TritonServer) -> None:
    plain = LLM(drafting_engine, kv_cache_gib=KV_CACHE_GIB)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (expected,) = plain.generate(PROMPT, params, use_tqdm=False)[0].outputs
    stats = plain.engine.stats()
    for _ in range(2):
        assert text_of(drafting_server, ask("ensemble", PROMPT, NUM_TOKENS, end_id=-1)) == expected.text

    def total(name: str) -> float:
        return value(drafting_server, f"kvforge_{name}_total")

    def steps() -> float:
        return value(drafting_server, "nv_trt_llm_general_metrics", general_type="iteration_counter")

    # The server has also asked for a token of its own. Counters follow within a second.
    wait_until(
        lambda: 2 * NUM_TOKENS <= total("generated_tokens") == steps() + total("accepted_draft_tokens"),
        "a step gives a token more than drafts that are right",
    )
    drafted, accepted = total("draft_tokens"), total("accepted_draft_tokens")
    assert 0 < accepted <= drafted and total("drafts") > 0 == total("early_exits")
    assert value(drafting_server, "kvforge_draft_acceptance") == pytest.approx(accepted / drafted)
    assert value(drafting_server, "kvforge_mean_accepted_length") == pytest.approx(accepted / total("drafts"))
    device, host = (value(drafting_server, "kvforge_kv_cache_bytes", memory=memory) for memory in ("device", "host"))
    assert (device, host) == (stats["kv_device_bytes"], stats["kv_host_bytes"])
    assert value(drafting_server, "kvforge_kv_cache_used_bytes", memory="device") == 0


def test_outputs_are_kept_for_requests_of_their_scope(drafting_engine: Path) -> None:
    options = ServerOptions(kv_cache_gib=KV_CACHE_GIB, speculative=SpeculativeConfig("suffix"))
    with started(TritonServer(drafting_engine, options)) as server:

        def answer(**parameters: str | int) -> Answer:
            asked = ask("tensorrt_llm", [5, 6, 7], 20, streaming=False, end_id=-1)
            return post(f"{server.http_url}/v2/models/tensorrt_llm/generate", {**asked, **parameters})

        statuses = list[int]()

        def counts_them() -> bool:
            """They are counted as drafts are made; a busy machine's balance may allow one alone."""
            statuses.append(answer(draft_scope="ab"[len(statuses) % 2]).status)
            return value(server, "kvforge_suffix_tokens") > 0

        wait_until(counts_them, "outputs of scopes are counted")
        statuses += [answer().status for _ in range(6)]
        assert statuses == [200] * len(statuses)
        counted = value(server, "kvforge_suffix_tokens")
        assert counted <= 20 * (len(statuses) - 6), "outputs without a scope are not"
        refused = answer(draft_scope=5)
        assert refused.status == 400 and "'draft_scope' cannot be used; give a text" in refused.body
