"""Triton's model processes, or all processes, are paused under open streams: every request gets its answer, and no
process ends."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvforge.serving.client import StreamingClient
from kvforge.serving.processes.facts import children, descendants
from kvforge.serving.server.launcher import TritonServer
from tests.support.fuzz.run import unharmed
from tests.support.serving.fake_server import fake_server, fake_text, fake_tokens
from tests.support.serving.server import ask, started

PAUSE_S = 1.5
"""Triton's Python backend waits a second for a model's process to say that it lives."""
NUM_PAUSES, NUM_STREAMS = 3, 6
TEXT, TOKENS, NUM_TOKENS = "wait for me", [5, 6, 7], 4


@pytest.fixture(scope="module")
def own_server(engine_dir: Path) -> Iterator[TritonServer]:
    with started(fake_server(engine_dir)) as running:
        yield running


@contextlib.contextmanager
def paused(pids: list[int]) -> Iterator[None]:
    """Those that have not ended meanwhile."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("everything", [False, True])
def test_a_pause_costs_no_request(own_server: TritonServer, engine_dir: Path, everything: bool) -> None:
    text, tokens = fake_text(engine_dir, TEXT, NUM_TOKENS), fake_tokens(engine_dir, TOKENS, NUM_TOKENS)
    over = threading.Event()

    def stream(model: str) -> int:
        """Requests one after the other, so that a pause meets some on their way into a model's process."""
        num_answers, is_text = 0, model != "tensorrt_llm"
        with StreamingClient(own_server.grpc_url) as client:
            while not over.is_set() or not num_answers:
                asked = ask(model, TEXT if is_text else TOKENS, NUM_TOKENS, end_id=-1)
                responses = list(client.generate(model, asked))
                if is_text:
                    assert "".join(response.text for response in responses) == text
                else:
                    assert [token for response in responses for token in response.token_ids] == tokens
                num_answers += 1
        return num_answers

    models = ["ensemble", "tensorrt_llm", "tensorrt_llm_bls"] * (NUM_STREAMS // 3)
    with unharmed(own_server), ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream, model) for model in models]
        try:
            for _ in range(NUM_PAUSES):
                time.sleep(0.2)
                pids = [process.pid for process in (descendants if everything else children)(own_server.pid)]
                with paused([own_server.pid, *pids] if everything else pids):
                    time.sleep(PAUSE_S)
        finally:
            over.set()
        assert all(future.result() for future in streams)
