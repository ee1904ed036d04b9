"""A tritonserver that locks itself up (docs/load-testing.md) is noticed and replaced."""

import contextlib
import os
import random
import threading
import time
from pathlib import Path

from tritonclient.utils import InferenceServerException

from kvforge.common.errors import KvforgeError
from kvforge.serving.client import StreamingClient
from tests.e2e.test_operations_restart import RESTART_TIMEOUT_S, answer, restarts, shown_on_failure
from tests.support.serving.serve_process import FAKE, ServeProcess
from tests.support.serving.server import ENDLESS, ask, wait_until

STEP_S, DELAY_MS = 0.05, 40
"""Of each step Triton is told to spend most between two locks that a cancelled stream's thread takes the other way
round. Elsewhere that is microseconds, and one in a thousand cancels hits them; here one in twenty."""
NUM_CLIENTS = 4


def test_a_locked_up_server_is_replaced(engine_dir: Path, tmp_path: Path) -> None:
    log, over = tmp_path / "log", threading.Event()

    def cancel() -> None:
        while not over.is_set():
            client = StreamingClient(running.grpc_url)
            with contextlib.suppress(KvforgeError, InferenceServerException):  # while no server listens
                next(client.generate("tensorrt_llm", ask("tensorrt_llm", [5, 6, 7], ENDLESS)))
            time.sleep(random.uniform(0, STEP_S))  # else quiet cores cancel at one time of every step
            client.cancel()
            client.close()

    env = {**os.environ, "TRITONSERVER_DELAY_GRPC_RESPONSE": str(DELAY_MS)}
    options = ("--step-s", str(STEP_S), "--log-file", str(log))
    with shown_on_failure(log), ServeProcess(engine_dir, *options, env=env, program=FAKE) as running:
        cancelling = [threading.Thread(target=cancel) for _ in range(NUM_CLIENTS)]
        for thread in cancelling:
            thread.start()
        try:
            wait_until(lambda: restarts(running) > 0, "the server is started again", 300.0)
        finally:
            over.set()
        running.wait_ready("the next server", RESTART_TIMEOUT_S)
        for thread in cancelling:
            thread.join()
        assert answer(running)
    # The race of cancels and writes locks tritonserver up or, seldom, crashes it: either way another takes its place.
    assert any(words in log.read_text() for words in ("a response has not left within 10 s", "Signal ("))
