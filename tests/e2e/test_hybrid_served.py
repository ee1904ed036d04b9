"""A server of a model with linear attention answers as transformers does, and goes on from the states that it keeps."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import pytest
import torch
import transformers

from kvforge.compiler import BuildOptions
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.serving.client import StreamingClient
from kvforge.serving.health.probe import read_metrics
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.models.engines import EngineSpec
from tests.support.models.shelf import EngineShelf
from tests.support.serving.server import ENDLESS, ask, started, streamed, used_pages, wait_until

SPEC = EngineSpec(
    "qwen3_5_text",
    model=(("num_hidden_layers", 4), ("max_position_embeddings", 65536)),
    options=BuildOptions(page_size=8, max_num_tokens=64, max_num_seqs=8, max_draft_len=3),
)
PROMPTS = [[3 + (7 * seed + place * place) % 300 for place in range(length)] for seed, length in enumerate((90, 3, 41))]
NUM_TOKENS = 24


def measured(server: TritonServer, name: str, label: str = "") -> float:
    values = read_metrics(server.metrics_url).items()
    return sum(value for key, value in values if key.startswith(f"kvforge_{name}") and label in key)


@pytest.fixture(scope="module")
def hybrid_server(engines: EngineShelf) -> Iterator[TritonServer]:
    drafts = SpeculativeConfig("ngram", 3, prompt_lookup_min=1)
    options = ServerOptions(kv_cache_gib=0.2, snapshot_every=2, num_snapshots=16, speculative=drafts)
    with started(TritonServer(engines.engine(SPEC), options)) as running:
        yield running


def expected(checkpoint: Path) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    texts = [model.generate(torch.tensor([one]), max_new_tokens=NUM_TOKENS, do_sample=False)[0] for one in PROMPTS]
    return [text[len(one) :].tolist() for text, one in zip(texts, PROMPTS, strict=True)]


def test_requests_at_once_and_again_are_answered_as_transformers_does(
    engines: EngineShelf, hybrid_server: TritonServer
) -> None:
    wanted = expected(engines.checkpoint(SPEC))
    for _ in range(2):
        with ThreadPoolExecutor(len(PROMPTS)) as pool, StreamingClient(hybrid_server.grpc_url) as client:
            cancelled = client.generate("tensorrt_llm", ask("tensorrt_llm", PROMPTS[0] * 3, ENDLESS))
            next(cancelled)
            answers = pool.map(streamed, repeat(hybrid_server), PROMPTS, repeat(NUM_TOKENS))
            next(cancelled)
            cancelled.close()
            assert list(answers) == wanted
    wait_until(lambda: used_pages(hybrid_server) == 0, "pages given back")
    wait_until(lambda: measured(hybrid_server, "states", 'states="used"') == 0, "rows given back")
    assert measured(hybrid_server, "states", 'states="max"') == 32
    assert measured(hybrid_server, "states", 'states="max_snapshots"') == 16
    assert 0 < measured(hybrid_server, "states", 'states="snapshots"') <= 16
    # The neighbour's answer may have taken all snapshots: one request after another finds that of the one before.
    assert streamed(hybrid_server, PROMPTS[0], NUM_TOKENS) == wanted[0]
    wait_until(lambda: measured(hybrid_server, "generated_tokens_total") > 0, "tokens counted")
    before = measured(hybrid_server, "reused_prompt_tokens_total")
    assert streamed(hybrid_server, PROMPTS[0], NUM_TOKENS) == wanted[0]
    wait_until(lambda: measured(hybrid_server, "reused_prompt_tokens_total") >= before + 88, "tokens counted")
