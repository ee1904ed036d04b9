"""One server over a small random-weight fp32 engine for all e2e tests, and the same engine offline."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import LLM
from kvforge.compiler import BuildOptions
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.models.engines import EngineShelf, EngineSpec

LONG = EngineSpec(
    "llama", cut=2, group_size=2, model=(("num_hidden_layers", 5), ("max_position_embeddings", 65536)),
    options=BuildOptions(page_size=16, max_num_tokens=256),
)  # fmt: skip
"""A context so long that a request can outlast every wait of a test, unless it is cancelled."""

KV_CACHE_GIB = 0.25


@pytest.fixture(scope="session")
def guided_logprobs() -> bool:
    """The engine has log-probabilities beside guides."""
    return True


@pytest.fixture(scope="session")
def engine_dir(engines: EngineShelf) -> Path:
    return engines.engine(LONG)


@pytest.fixture(scope="session")
def llm(engine_dir: Path) -> LLM:
    """The engine offline: what the server must answer."""
    return LLM(engine_dir, kv_cache_gib=KV_CACHE_GIB)


@pytest.fixture(scope="session")
def server(engine_dir: Path) -> Iterator[TritonServer]:
    with TritonServer(engine_dir, ServerOptions(kv_cache_gib=KV_CACHE_GIB)) as running:
        yield running
