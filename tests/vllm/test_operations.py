"""Draining, dying ranks and vanishing clients on engines of target ``vllm``: nobody waits, and nothing stays behind."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvforge import LLM, SamplingParams
from kvforge.common.errors import KvforgeError
from kvforge.serving.client import StreamingClient
from kvforge.serving.processes.facts import ProcessId, children, descendants, wait_gone
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.e2e.test_operations_drain import test_sigterm_under_load  # noqa: F401 - collected here, with this folder's fixtures
from tests.e2e.test_vanishing_clients import test_vanishing_clients  # noqa: F401
from tests.support.serving.serve_process import ServeProcess
from tests.support.serving.server import ENDLESS, WAIT_S, ask, engine_process, streamed, used_pages, wait_until
from tests.vllm.conftest import KV_CACHE_GIB

PROMPT = [5, 6, 7]
ENDED = "(a process of vLLM's ranks ended|the engine stopped answering for .* and was ended).*; send the request"
"""The second where the engine process waits for a rank that does not answer any more."""
ENGINE_ENDED = r"engine process ended unexpectedly .signal 9.*; send the request"


@pytest.fixture(params=["one rank", "two ranks"])
def running(request: pytest.FixtureRequest, engine_dir: Path, two_rank_engine: Path) -> Iterator[ServeProcess]:
    engine = engine_dir if request.param == "one rank" else two_rank_engine
    with ServeProcess(engine, "--drain-timeout", "600", "--kv-cache-gib", str(KV_CACHE_GIB)) as started:
        regions = shared_memory(started.pid)
        yield started
    wait_until(lambda: not any(map(os.path.exists, regions)), f"{regions} removed")


@pytest.fixture
def offline(llm: LLM) -> Callable[[list[str], int], list[str]]:
    def texts(prompts: list[str], num_tokens: int) -> list[str]:
        params = SamplingParams(max_tokens=num_tokens, temperature=0)
        return [output.outputs[0].text for output in llm.generate(prompts, params)]

    return texts


def ranks(server: TritonServer) -> list[ProcessId]:
    """vLLM's processes of the ranks; the engine process itself has none where there are several."""
    started = children(engine_process(server.pid).pid)
    return [child for child in started if b"VLLM::Worker" in _command(child)]


def _command(process: ProcessId) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    return b""


def shared_memory(pid: int) -> set[str]:
    """Files of shared memory by which the ranks of a server talk to the engine process."""
    found = set()
    for process in descendants(pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process.pid}/maps").read_text().split()
            found |= {word for word in words if word.startswith("/dev/shm/") and "kvforge" not in word}
    return {path for path in found if os.path.exists(path)}


@pytest.mark.parametrize(("killed", "words"), [(0, ENGINE_ENDED), (1, ENDED), (2, ENDED)], ids=str)
def test_a_killed_process(two_ranks: TritonServer, killed: int, words: str) -> None:
    """The engine process, where vLLM's scheduler runs, or a rank: open requests get an error, the engine is started
    again, and what the dead one had is gone."""
    before = streamed(two_ranks, PROMPT)
    processes, regions = [engine_process(two_ranks.pid), *ranks(two_ranks)], shared_memory(two_ranks.pid)
    assert len(processes) == 3 and regions
    with StreamingClient(two_ranks.grpc_url) as client:
        responses = client.generate("tensorrt_llm", ask("tensorrt_llm", PROMPT, ENDLESS))
        next(responses)
        processes[killed].kill()
        with pytest.raises(KvforgeError, match=words):
            for _ in responses:
                pass
    assert streamed(two_ranks, PROMPT) == before
    assert wait_gone(processes, timeout_s=WAIT_S) == []
    wait_until(lambda: not any(map(os.path.exists, regions)), f"{regions} removed")
    wait_until(lambda: used_pages(two_ranks) == 0, "all pages free")
    assert two_ranks.failure() is None


def test_a_rank_killed_between_requests(two_ranks: TritonServer) -> None:
    """Nobody asks for anything meanwhile; whoever comes then is answered, or told at once that the engine is not."""
    before, process = streamed(two_ranks, PROMPT), engine_process(two_ranks.pid)
    ranks(two_ranks)[1].kill()
    assert wait_gone([process], timeout_s=WAIT_S) == []
    wait_until(lambda: is_answered(two_ranks), "an answer")
    assert streamed(two_ranks, PROMPT) == before


def is_answered(server: TritonServer) -> bool:
    with contextlib.suppress(KvforgeError):
        return bool(streamed(server, PROMPT))
    return False


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_stays_behind(num_ranks: int, engine_dir: Path, two_rank_engine: Path) -> None:
    engine = engine_dir if num_ranks == 1 else two_rank_engine
    with TritonServer(engine, ServerOptions(kv_cache_gib=KV_CACHE_GIB)) as server:
        processes, regions = descendants(server.pid), shared_memory(server.pid)
        assert len(ranks(server)) == (0 if num_ranks == 1 else 2) and bool(regions) == (num_ranks > 1)
        assert streamed(server, PROMPT)
    assert wait_gone(processes, timeout_s=WAIT_S) == []
    wait_until(lambda: not any(map(os.path.exists, regions)), f"{regions} removed")
