"""Runs fuzz cases from several threads beside each other, and holds the server to what it owes everybody."""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from kvforge.serving.health.probe import read_metrics
from kvforge.serving.processes.stacks import ask
from kvforge.serving.server.launcher import TritonServer
from tests.support.fuzz.cases import Case
from tests.support.fuzz.wire import Answer
from tests.support.serving.server import lasting_processes, log_of, used_pages, wait_until

NUM_THREADS = 6
ACTIVE = 'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"}'


class Connection(Protocol):
    def close(self) -> None: ...


def check_errors(errors: Sequence[str], about: Any) -> None:
    """One sentence for people, not a traceback, not silence."""
    for error in errors:
        assert error.strip(), about
        for word in ("Traceback", "At:\n", 'File "', ".py(", "Fatal Python"):
            assert word not in error, (about, error)


def check_answer(case: Case, answer: Answer) -> None:
    """A good request got its answer; a broken one got one or an error."""
    assert answer.ended, (case, answer)
    check_errors(answer.errors, case)
    if case.expected is not None:
        assert answer.errors == [], (case, answer)
        assert answer.result(case.model) == case.expected, (case, answer)


def run_cases(
    connect: Callable[[], Connection], send: Callable[[Any, random.Random], Any], cases: Sequence[Any], seed: object
) -> list[Any]:
    """`send(connection, case, rng)` for all cases, each thread on a connection of its own; the first failure counts."""

    def worker(index: int) -> list[Any]:
        connection = connect()
        try:
            mine = range(index, len(cases), NUM_THREADS)
            return [send(connection, cases[i], random.Random(f"{seed}/{i}")) for i in mine]  # type: ignore[call-arg, arg-type]
        finally:
            connection.close()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return [item for part in pool.map(worker, range(NUM_THREADS)) for item in part]


def processes(server: TritonServer) -> dict[int, str]:
    """tritonserver, its stubs and the engine: pid to name."""
    pids = [server.pid, *(process.pid for process in lasting_processes(server.pid))]
    return {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}


def active_requests(server: TritonServer) -> float:
    return read_metrics(server.metrics_url)[ACTIVE]


@contextmanager
def unharmed(server: TritonServer) -> Iterator[None]:
    """After the block the same processes run, no request is active and all pages are free."""
    before = processes(server)
    yield
    assert processes(server) == before
    assert server.failure() is None
    try:
        wait_until(lambda: active_requests(server) == 0, "no active request")
        wait_until(lambda: used_pages(server) == 0, "all pages free")
    except AssertionError:
        print(what_goes_on(server), file=sys.stderr)
        raise


def what_goes_on(server: TritonServer) -> str:
    """What a server that does not come to rest counts, how busy the machine is, and where the threads stand."""
    counts = {name: value for name, value in read_metrics(server.metrics_url).items() if value and "bucket" not in name}
    used = {
        f"{name} {pid}": Path(f"/proc/{pid}/schedstat").read_text().split() for pid, name in processes(server).items()
    }
    ask(lasting_processes(server.pid))
    return f"load {os.getloadavg()}\n{counts}\nns that each ran and waited for a core: {used}\n{log_of(server)}"
