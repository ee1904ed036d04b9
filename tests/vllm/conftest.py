"""Engines of target ``vllm``: one that is served, the same offline, and the same model on kvforge's own graphs.

All of it needs an environment with vLLM for CPUs; docs/distributed.md says how to make it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import LLM
from kvforge.compiler import BuildOptions, build_engine
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.models.checkpoints import make_checkpoint
from tests.support.sessions.eager import eager_session

PYTHON = os.environ.get("KVFORGE_VLLM_PYTHON")
KV_CACHE_GIB = 0.25
MODEL = {"num_hidden_layers": 5, "head_dim": 32, "hidden_size": 128, "max_position_embeddings": 65536}
"""Heads of 32 are the smallest that vLLM has for CPUs; the context is as long as that of tests/e2e."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "needs vLLM; set KVFORGE_VLLM_PYTHON to the python of its environment"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            if PYTHON is None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def one_core() -> Iterator[None]:
    """Several engines share the machine; each has a core's worth of threads, wherever they run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def guided_logprobs() -> bool:
    """The engine has no log-probabilities beside guides."""
    return False


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with a cut, AcrossKV groups of 2 and a ragged last one."""
    return make_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint", "llama", cut=2, group_size=2, **MODEL)


def build(checkpoint: Path, output: Path, num_ranks: int = 1) -> Path:
    """An engine of target ``vllm``, without what vLLM compiles."""
    options = BuildOptions(
        target="vllm",
        dtype="float32",
        max_num_tokens=256,
        tensor_parallel_size=num_ranks,
        engine_args='{"enforce_eager": true}',
    )
    build_engine(checkpoint, output, options)
    return output


@pytest.fixture(scope="session")
def engine_dir(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkpoint, tmp_path_factory.mktemp("served") / "engine")


@pytest.fixture(scope="session")
def llm(engine_dir: Path) -> LLM:
    """The engine offline: what the server must answer."""
    return LLM(engine_dir, kv_cache_gib=KV_CACHE_GIB)


@pytest.fixture(scope="session")
def own(llm: LLM, checkpoint: Path) -> LLM:
    """The same model on kvforge's own graphs."""
    session = eager_session(checkpoint, BuildOptions(dtype="float32", max_num_tokens=256))
    return LLM(session=session, tokenizer=llm.tokenizer, kv_cache_gib=KV_CACHE_GIB)


@pytest.fixture(scope="session")
def server(engine_dir: Path) -> Iterator[TritonServer]:
    with TritonServer(engine_dir, ServerOptions(kv_cache_gib=KV_CACHE_GIB)) as running:
        yield running


@pytest.fixture(scope="session")
def two_rank_engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkpoint, tmp_path_factory.mktemp("ranks") / "engine", num_ranks=2)


@pytest.fixture(scope="module")
def two_ranks(two_rank_engine: Path) -> Iterator[TritonServer]:
    with TritonServer(two_rank_engine, ServerOptions(kv_cache_gib=KV_CACHE_GIB)) as running:
        yield running
