"""One server over a small random-weight fp32 engine for all e2e tests, and the same engine offline."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import LLM
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.models.engines import LONG
from tests.support.models.shelf import EngineShelf
from tests.support.serving.server import log_of

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
def kept_servers(engine_dir: Path) -> Iterator["KeptServers"]:
    kept = KeptServers(engine_dir)
    yield kept
    kept.stop()


@pytest.fixture(scope="module")
def server(kept_servers: "KeptServers") -> Iterator[TritonServer]:
    """One for all files, unless it ended: that fails the file in which it did, and the next one gets another."""
    running = kept_servers.living()
    yield running
    assert running.failure() is None, log_of(running)


@pytest.fixture(autouse=True)
def _server_lives(request: pytest.FixtureRequest) -> None:
    """What is left of a file whose server ended says nothing; the file fails at its end."""
    if "server" in request.fixturenames and (failure := request.getfixturevalue("server").failure()) is not None:
        pytest.skip(f"the server of this file ended in an earlier test: {failure}")


class KeptServers:
    """A server that runs on from file to file, replaced between two of them where it ended."""

    def __init__(self, engine_dir: Path) -> None:
        self._engine_dir = engine_dir
        self._running: TritonServer | None = None

    def living(self) -> TritonServer:
        if self._running is not None and self._running.failure() is not None:
            self.stop()
        if self._running is None:
            server = TritonServer(self._engine_dir, ServerOptions(kv_cache_gib=KV_CACHE_GIB))
            try:
                self._running = server.start()
            except BaseException:
                print(log_of(server), file=sys.stderr)
                raise
        return self._running

    def stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Iterator[None]:
    """A test that fails shows the logs of the servers that it was given."""
    report = yield
    if report.failed:
        servers = {name: value for name, value in item.funcargs.items() if isinstance(value, TritonServer)}
        report.sections += [(f"stderr of {name}", log_of(server)) for name, server in servers.items()]
    return report
