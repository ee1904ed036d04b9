"""A thousand clients connect and vanish; eight streams beside them get their answers, and nothing is left behind."""

import contextlib
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from grpc import RpcError

from kvforge import LLM
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.e2e.conftest import KV_CACHE_GIB
from tests.support.fuzz.known import KnownAnswers
from tests.support.fuzz.run import check_answer, processes, unharmed
from tests.support.fuzz.wire import Grpc
from tests.support.hostile.vanishing import vanish
from tests.support.serving.server import log_of, started, wait_until

SEED = 22
ATTEMPTS = 4
NUM_STREAMS, NUM_VANISHING_AT_ONCE = 8, 16
SPARE_FDS, SPARE_THREADS = 40, 110
"""What thread pools and kept connections may grow by: a text model has a thread for each request that runs and for 32
more, which are made when first needed. A leak of one per client would be a thousand."""


def usage(server: TritonServer) -> dict[int, tuple[int, int]]:
    """Open files and threads of tritonserver, its stubs and the engine, by pid."""
    return {
        pid: (len(list(Path(f"/proc/{pid}/fd").iterdir())), len(list(Path(f"/proc/{pid}/task").iterdir())))
        for pid in processes(server)
    }


def near(server: TritonServer, before: dict[int, tuple[int, int]]) -> bool:
    now = usage(server)
    return all(
        now[pid][0] <= fds + SPARE_FDS and now[pid][1] <= threads + SPARE_THREADS
        for pid, (fds, threads) in before.items()
    )


def is_locked_up(log: str) -> bool:
    return "a response has not left within" in log


def has_grpc_crashed(log: str) -> bool:
    """The thread in which tritonserver crashed ran the program's own code, no model, backend or core of Triton's."""
    _, signal_came, stack = log.partition("Signal (11) received.")
    libraries = re.findall(r"^ *\d+# 0x\w+ in (\S+)$", stack, re.MULTILINE)
    own = ("tritonserver", "libc.so.6", "libstdc++.so.6")
    return bool(signal_came and libraries) and all(Path(library).name in own for library in libraries)


@contextlib.contextmanager
def killed_when_it_fails(server: TritonServer) -> Iterator[None]:
    """So that nobody waits for one that has failed."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            if server.failure() is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server.pid, signal.SIGKILL)
                return

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def vanish_beside_streams(server: TritonServer, known: KnownAnswers, number: int, seed: str) -> None:
    gone = threading.Event()

    def stream(index: int) -> int:
        rng, answered = random.Random(f"{seed}/good/{index}"), 0
        connection = Grpc(server.grpc_url)
        while not gone.is_set() or not answered:
            case = known.good(rng, rng.choice(["ensemble", "tensorrt_llm"]))
            check_answer(case, connection.stream(case))
            answered += 1
        connection.close()
        return answered

    with unharmed(server), ThreadPoolExecutor(NUM_STREAMS) as streams:
        with ThreadPoolExecutor(NUM_VANISHING_AT_ONCE) as clients:  # threads that are kept have begun before we count
            list(clients.map(lambda index: vanish(server, f"{seed}/warm/{index}"), range(4 * NUM_VANISHING_AT_ONCE)))
        before = usage(server)
        running = [streams.submit(stream, index) for index in range(NUM_STREAMS)]
        try:
            with ThreadPoolExecutor(NUM_VANISHING_AT_ONCE) as clients:
                list(clients.map(lambda index: vanish(server, f"{seed}/{index}"), range(number)))
        finally:
            gone.set()
        assert all(future.result() for future in running)
    wait_until(lambda: near(server, before), f"files and threads near {before}")


def test_vanishing_clients(engine_dir: Path, llm: LLM, full: bool) -> None:
    """On a server of its own, and on another one where Triton's gRPC locked itself up or crashed: a tenth of the
    clients break gRPC streams, and one in a thousand such ends can do that (docs/load-testing.md)."""
    known = KnownAnswers(llm)
    for attempt in range(ATTEMPTS):
        seed = f"{SEED}/{attempt}"
        print(f"seed {seed}")
        with started(TritonServer(engine_dir, ServerOptions(kv_cache_gib=KV_CACHE_GIB))) as server:
            try:
                with killed_when_it_fails(server):
                    vanish_beside_streams(server, known, 5000 if full else 1000, seed)
                return
            except (AssertionError, OSError, RpcError):
                log = log_of(server)
                if not (is_locked_up(log) or has_grpc_crashed(log)) or attempt == ATTEMPTS - 1:
                    print(log, file=sys.stderr)
                    raise


@pytest.mark.parametrize(
    ("library", "is_known"),
    [("/bin/tritonserver", True), ("/b/libtriton_python.so", False), ("/libtritonserver.so", False)],
)
def test_which_crashes_are_known(library: str, is_known: bool) -> None:
    stack = f" 0# 0x00000000001FE97E in {library}\n 1# 0x0000000000000001 in /lib/libc.so.6\n"
    assert has_grpc_crashed(f"failure: ended\nSignal (11) received.\n{stack}") is is_known
    assert not has_grpc_crashed(stack) and not has_grpc_crashed("Signal (11) received.\n")
