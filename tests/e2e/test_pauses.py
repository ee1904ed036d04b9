"""Triton's model processes, or all processes, or its threads of HTTP, are paused under open streams: every request gets
its answer, and no process ends."""

import contextlib
import ctypes
import json
import os
import signal
import threading
import time
import urllib.request
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
NUM_RESPONSES = 1500
"""Several times as many as wait between two of its threads."""
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


@contextlib.contextmanager
def traced(threads: list[int]) -> Iterator[None]:
    """Threads of another process stand still, and its others do not, as a debugger does it (ptrace(2))."""
    seize, interrupt, detach, wait_all = 0x4206, 0x4207, 17, 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)

    def ptrace(request: int, thread: int) -> None:
        if libc.ptrace(ctypes.c_long(request), ctypes.c_long(thread), None, None) != 0:
            raise OSError(ctypes.get_errno(), "ptrace")

    held = []
    try:
        for thread in threads:
            ptrace(seize, thread)
            ptrace(interrupt, thread)
            os.waitpid(thread, wait_all)
            held.append(thread)
        yield
    finally:
        for thread in held:
            ptrace(detach, thread)


def waiting_for_sockets(pid: int) -> list[int]:
    """The threads of a process that wait for events of sockets: those of Triton's protocols."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(task.name) for task in tasks.iterdir() if "epoll" in (task / "wchan").read_text()]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_a_pause_of_the_threads_of_http_costs_no_response(
    own_server: TritonServer, engine_dir: Path, model: str
) -> None:
    asked = {"end_id": -1, "stream": True, "text_input": TEXT, "max_tokens": NUM_RESPONSES}
    if model == "tensorrt_llm":
        asked = {"end_id": -1, "streaming": True, "input_ids": TOKENS, "input_lengths": len(TOKENS)}
        asked["request_output_len"] = NUM_RESPONSES
    url = f"{own_server.http_url}/v2/models/{model}/generate_stream"
    request = urllib.request.Request(url, json.dumps(asked).encode())
    with unharmed(own_server), urllib.request.urlopen(request, timeout=60) as stream:
        lines = [stream.readline()]
        try:
            with traced(waiting_for_sockets(own_server.pid)):
                time.sleep(PAUSE_S)
        except PermissionError:
            pytest.skip("threads cannot be held here: no right to ptrace")
        lines += stream.readlines()
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]
    if model == "ensemble":
        assert "".join(event["text_output"] for event in events) == fake_text(engine_dir, TEXT, NUM_RESPONSES)
    else:
        assert [event["output_ids"] for event in events] == fake_tokens(engine_dir, TOKENS, NUM_RESPONSES)


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
