"""SIGTERM under load: accepted requests finish as offline, later ones are refused, a second signal ends the wait."""

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.serving.client import StreamingClient
from kvforge.serving.health.probe import is_ready
from kvforge.serving.processes.facts import descendants, wait_gone
from tests.support.serving.fake_server import fake_text
from tests.support.serving.serve_process import FAKE, ServeProcess
from tests.support.serving.server import ENDLESS, WAIT_S, ask, wait_until

NUM_STREAMS = 16
TOKENS = 150
SHARED_MEMORY = Path("/dev/shm")


class Request(threading.Thread):
    """One streamed request on a connection of its own: `text` and `error` at its end, `started` at its first token."""

    def __init__(self, url: str, prompt: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.url, self.prompt, self.max_tokens = url, prompt, max_tokens
        self.started, self.text, self.error = threading.Event(), "", ""

    def run(self) -> None:
        try:
            with StreamingClient(self.url) as client:
                for response in client.generate("ensemble", ask("ensemble", self.prompt, self.max_tokens)):
                    self.text += response.text
                    self.started.set()
        except KvforgeError as error:
            self.error = str(error)


@pytest.fixture
def running(engine_dir: Path, tmp_path: Path) -> Iterator[ServeProcess]:
    """A server whose engine and temporary files lie in folders with spaces in their names."""
    engine, temporary = tmp_path / "an engine", Path(tempfile.mkdtemp(prefix="kv f", dir="/tmp"))
    engine.symlink_to(engine_dir)
    try:
        environment = os.environ | {"TMPDIR": str(temporary)}
        with ServeProcess(engine, "--drain-timeout", "600", env=environment, program=FAKE) as started:
            yield started
    finally:
        shutil.rmtree(temporary)


@pytest.fixture
def offline(engine_dir: Path) -> Callable[[list[str], int], list[str]]:
    """The answers to prompts of as many tokens, without a server."""
    return lambda prompts, num_tokens: [fake_text(engine_dir, prompt, num_tokens) for prompt in prompts]


def test_sigterm_under_load(running: ServeProcess, offline: Callable[[list[str], int], list[str]]) -> None:
    prompts = [f"prompt number {i}" for i in range(NUM_STREAMS)]
    texts = offline(prompts, TOKENS)
    expected = dict(zip(prompts, texts, strict=True))
    processes = descendants(running.pid)
    endless = Request(running.grpc_url, "without an end", ENDLESS)
    endless.start()
    accepted = [Request(running.grpc_url, prompt, TOKENS) for prompt in prompts]
    for request in accepted:
        request.start()
    assert all(request.started.wait(WAIT_S) for request in [endless, *accepted])
    arrivals: list[Request] = []
    enough = threading.Event()

    def arrive() -> None:
        while not enough.wait(0.02 if len(arrivals) < 100 else 0.5):  # however late the signal is heard
            arrivals.append(Request(running.grpc_url, prompts[len(arrivals) % NUM_STREAMS], TOKENS))
            arrivals[-1].start()

    more = threading.Thread(target=arrive)
    more.start()
    time.sleep(0.1)
    running.signal(signal.SIGTERM)
    wait_until(lambda: running.health()[0] == 503, "readiness withdrawn")
    assert running.health()[1]["reasons"] == ["the server is shutting down"]
    assert running.health("live")[0] == 200
    wait_until(lambda: any("shutting down" in request.error for request in arrivals), "a refusal")
    enough.set()
    more.join()
    for request in [*accepted, *arrivals]:
        request.join(WAIT_S)
    assert not any(request.is_alive() for request in [*accepted, *arrivals])
    assert [request.error for request in accepted] == [""] * NUM_STREAMS
    assert [request.text for request in accepted] == texts
    for request in arrivals:
        assert request.error or request.text == expected[request.prompt]
        assert not request.error or "shutting down" in request.error
    assert endless.is_alive() and is_ready(running.http_url)
    running.signal(signal.SIGTERM)
    endless.join(WAIT_S)
    assert endless.error
    code, said = running.wait()
    assert code == 0
    assert [line for line in said.splitlines() if "starting it once more" not in line] == []  # said at the start
    assert wait_gone(processes, timeout_s=WAIT_S) == []
    assert not list(SHARED_MEMORY.glob(f"kvforge_{running.pid}_*"))
