"""One server over a small random-weight fp32 engine for all e2e tests, and the same engine offline."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import LLM
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.models.engines import LONG
from tests.support.models.shelf import EngineShelf
from tests.support.serving.server import log_of, started

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
    with started(TritonServer(engine_dir, ServerOptions(kv_cache_gib=KV_CACHE_GIB))) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Iterator[None]:
    """A test that fails shows the logs of the servers that it was given."""
    report = yield
    if report.failed:
        servers = {name: value for name, value in item.funcargs.items() if isinstance(value, TritonServer)}
        report.sections += [(f"stderr of {name}", log_of(server)) for name, server in servers.items()]
    return report
