"""A thousand clients connect and vanish; eight streams beside them get their answers, and nothing is left behind."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvforge import LLM
from kvforge.serving.server.launcher import TritonServer
from tests.support.fuzz.known import KnownAnswers
from tests.support.fuzz.run import check_answer, processes, unharmed
from tests.support.fuzz.wire import Grpc
from tests.support.hostile.vanishing import vanish
from tests.support.serving.server import wait_until

SEED = 22
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


def test_vanishing_clients(server: TritonServer, llm: LLM, full: bool) -> None:
    print(f"seed {SEED}")
    known = KnownAnswers(llm)
    number = 5000 if full else 1000
    gone = threading.Event()

    def stream(index: int) -> int:
        rng, answered = random.Random(f"{SEED}/good/{index}"), 0
        connection = Grpc(server.grpc_url)
        while not gone.is_set() or not answered:
            case = known.good(rng, rng.choice(["ensemble", "tensorrt_llm"]))
            check_answer(case, connection.stream(case))
            answered += 1
        connection.close()
        return answered

    with unharmed(server), ThreadPoolExecutor(NUM_STREAMS) as streams:
        with ThreadPoolExecutor(NUM_VANISHING_AT_ONCE) as clients:  # threads that are kept have begun before we count
            list(clients.map(lambda index: vanish(server, f"{SEED}/warm/{index}"), range(4 * NUM_VANISHING_AT_ONCE)))
        before = usage(server)
        running = [streams.submit(stream, index) for index in range(NUM_STREAMS)]
        try:
            with ThreadPoolExecutor(NUM_VANISHING_AT_ONCE) as clients:
                list(clients.map(lambda index: vanish(server, f"{SEED}/{index}"), range(number)))
        finally:
            gone.set()
        assert all(future.result() for future in running)
    wait_until(lambda: near(server, before), f"files and threads near {before}")
