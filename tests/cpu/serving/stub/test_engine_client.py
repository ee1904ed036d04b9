"""The engine process behind its client, with an engine that computes nothing."""

import json
import os
import queue
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from kvforge.common.errors import EngineError
from kvforge.common.records import to_text
from kvforge.common.refusals import Refusal
from kvforge.serving.engine.output_rows import StepOutput
from kvforge.serving.options import EngineOptions
from kvforge.serving.processes.facts import process_id, wait_gone
from kvforge.serving.stub import engine_client
from kvforge.serving.stub.engine_client import EngineClient
from tests.support.serving import fake_engine
from tests.support.serving.fake_engine import HOLD, PANIC, SPIN

FAKE = [sys.executable, fake_engine.__file__, "no engine", "--server-pid", str(os.getpid()), "--step-s", "0.001",
        "--floor-s", "2"]  # fmt: skip
WAIT_S = 180.0
FEW_FILES = 3
"""Descriptors, fewer than any process has open."""


class Listener:
    """Queues what the engine reports."""

    def __init__(self) -> None:
        self.tokens: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self.refused: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.stats: dict = {}

    def on_tokens(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self.tokens.put(output)

    def on_refused(self, request_id: str, refusal: Refusal) -> None:
        self.refused.put((request_id, str(refusal)))

    def on_stats(self, stats: dict) -> None:
        self.stats = stats

    def on_lost(self, error: str) -> None:
        self.lost.put(error)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def client(listener: Listener):
    client = EngineClient(FAKE, listener)
    client.start()
    yield client
    client.close()


def add(client: EngineClient, request_id: str, prompt: list[int], max_tokens: int, **params) -> None:
    message = {"op": "add", "id": request_id, "prompt": prompt, "params": {"max_tokens": max_tokens, **params}}
    client.send(client.encode(message))


def read(listener: Listener, request_id: str) -> list[StepOutput]:
    """All outputs of one request up to its end."""
    found: list[StepOutput] = []
    while not found or found[-1].finish_reason is None:
        output = listener.tokens.get(timeout=WAIT_S)
        if output.engine_id == request_id:
            found.append(output)
    return found


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def until(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_tokens_come_back_and_repeat(client: EngineClient, listener: Listener) -> None:
    add(client, "a", [1, 2, 3], 5, logprobs=0)
    first = read(listener, "a")
    add(client, "b", [1, 2, 3], 5)
    second = read(listener, "b")
    assert [output.tokens for output in first] == [output.tokens for output in second]
    assert (len(first), first[-1].finish_reason) == (5, "length")
    assert (first[0].log_probs, second[0].log_probs) == ([-1.0], None)


def test_a_refusal_keeps_nothing(client: EngineClient, listener: Listener) -> None:
    add(client, "long", [1] * 600, 5)
    assert listener.refused.get(timeout=WAIT_S) == ("long", "the prompt has 600 tokens, the engine takes 511.")
    add(client, "bad", [1], 5, top_p=7.0)
    request_id, error = listener.refused.get(timeout=WAIT_S)
    assert request_id == "bad"
    assert "top_p is 7.0" in error
    add(client, "good", [1], 2)
    assert len(read(listener, "good")) == 2


def test_a_surprise_in_one_request_leaves_the_engine_running(client: EngineClient, listener: Listener) -> None:
    add(client, "bystander", [1], 20)
    add(client, "poison", [-7], 5)
    assert listener.refused.get(timeout=WAIT_S) == ("poison", "the request failed; poison.")
    assert len(read(listener, "bystander")) == 20


def test_a_native_library_s_panic_in_one_request_leaves_the_engine_running(
    client: EngineClient, listener: Listener
) -> None:
    add(client, "bystander", [1], 20)
    add(client, "panic", [PANIC], 5)
    assert listener.refused.get(timeout=WAIT_S) == ("panic", "the request failed; a pattern took too long.")
    assert len(read(listener, "bystander")) == 20


def test_abort_frees_pages_and_is_idempotent(client: EngineClient, listener: Listener) -> None:
    add(client, "endless", [1, 2], 10**6)
    until(lambda: listener.stats.get("num_used_pages", 0) > 0)
    for _ in range(2):
        client.abort("endless")
    until(lambda: listener.stats["num_used_pages"] == 0)


def test_a_killed_process_is_reported_and_replaced(client: EngineClient, listener: Listener) -> None:
    add(client, "endless", [1, 2], 10**6)
    listener.tokens.get(timeout=WAIT_S)
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert "signal 9" in listener.lost.get(timeout=WAIT_S)
    add(client, "next", [1, 2], 3)
    assert len(read(listener, "next")) == 3
    assert client.pid != pid


def test_a_process_that_cannot_be_started_is_a_failure(listener: Listener, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"cannot be started.*No such file"):
        EngineClient([str(tmp_path / "absent")], listener).start()


def test_a_command_that_is_none_is_a_failure_and_no_endless_start(listener: Listener) -> None:
    with pytest.raises(EngineError, match=r"the engine process cannot be started: embedded null byte"):
        EngineClient(["\0"], listener).start()


def test_a_message_that_surprises_the_listener_ends_the_process_not_the_reading() -> None:
    class Surprised(Listener):
        def on_tokens(self, outputs: list[StepOutput]) -> None:
            if outputs[0].engine_id == "odd":
                raise KeyError("odd")
            super().on_tokens(outputs)

    listener = Surprised()
    client = EngineClient(FAKE, listener)
    client.start()
    add(client, "odd", [1], 5)
    assert "could not be taken in: 'odd'" in listener.lost.get(timeout=WAIT_S)
    add(client, "next", [1], 2)
    assert len(read(listener, "next")) == 2
    client.close()


def test_what_is_sent_after_the_last_attempt_to_start_is_refused() -> None:
    """Nobody would answer it: the listener is told of the loss once."""
    outcomes: list[str] = []

    class Sending(Listener):
        def on_lost(self, error: str) -> None:
            try:
                client.send(client.encode({"op": "abort", "id": "a"}))
                outcomes.append("waits")
            except EngineError as problem:
                outcomes.append(str(problem))

    client = EngineClient([sys.executable, "-c", "raise SystemExit(3)"], Sending())
    with pytest.raises(EngineError, match="exit status 3"):
        client.start()
    client.close()
    assert len(outcomes) == 1 and "exit status 3" in outcomes[0]


@pytest.mark.parametrize("how", ["stopped", "spinning", "holding the lock", "stopped while idle"])
def test_a_process_that_does_not_step_is_reported_and_replaced(
    client: EngineClient, listener: Listener, how: str
) -> None:
    """It is alive, and its other threads may be too."""
    for name in ("first", "second"):  # from steps of unknown length to known ones
        add(client, name, [1, 2], 10)
        read(listener, name)
    pid = client.pid
    assert pid is not None
    if how != "stopped while idle":
        first = {"spinning": SPIN, "holding the lock": HOLD}.get(how, 1)
        add(client, "endless", [first, 2], 10**6)
        if how != "holding the lock":  # which the thread that sends tokens needs too
            listener.tokens.get(timeout=WAIT_S)
    if how.startswith("stopped"):
        os.kill(pid, signal.SIGSTOP)
    states = set()
    while listener.lost.empty():
        states.add(client.state)
        time.sleep(0.01)
    assert "stopped answering" in listener.lost.get()
    while client.state != "ready":
        states.add(client.state)
        time.sleep(0.01)
    assert states == {"ready", "stalled"}
    add(client, "next", [1, 2], 3)
    assert len(read(listener, "next")) == 3
    assert client.pid != pid


def test_what_waits_for_a_process_that_does_not_read_is_bounded_and_goes_with_it(
    client: EngineClient, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client._outgoing, "_max_bytes", 10**6)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    refused = 0
    for index in range(10_000):
        try:
            add(client, f"waits {index}", [1] * 200, 5)
        except EngineError as error:
            assert "is behind" in str(error) and "later" in str(error)
            refused += 1
            client.abort(f"waits {index}")
    assert 0 < refused < 10_000
    assert client._outgoing.num_bytes < 10**6 + 10_000 * 40
    listener.lost.get(timeout=WAIT_S)
    add(client, "next", [1, 2], 3)
    assert len(read(listener, "next")) == 3  # not behind thousands that nobody waits for
    assert client._outgoing.num_bytes == 0


def test_an_engine_is_started_again_once_there_are_descriptors(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none can be started, a request has it tried again, but not each."""
    monkeypatch.setattr(engine_client, "START_ATTEMPTS", 1)
    client = EngineClient(FAKE, listener)
    client.start()
    assert client.pid is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, hard))
    try:
        client.kill()
        listener.lost.get(timeout=WAIT_S)
        assert "Too many open files" in listener.lost.get(timeout=WAIT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert client.state == "failed" and "Too many open files" in str(client.failure)
    for _ in range(100):
        with pytest.raises(EngineError, match="Too many open files"):
            add(client, "early", [1, 2], 3)
    assert client.state == "failed" and listener.lost.empty()
    client._retry_at = 0.0
    with pytest.raises(EngineError, match="Too many open files"):
        add(client, "the one that has it tried", [1, 2], 3)
    until(lambda: client.state == "ready")
    add(client, "next", [1, 2], 3)
    assert len(read(listener, "next")) == 3
    client.close()


def test_no_room_for_a_thread_refuses_the_request_and_no_more(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EngineClient([sys.executable, "-c", "raise SystemExit(3)"], listener)
    with pytest.raises(EngineError, match="exit status 3"):
        client.start()
    client._retry_at = 0.0
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(EngineError, match="can't start new thread; send the request again later"):
            add(client, "a", [1], 2)
    with pytest.raises(EngineError, match="exit status 3"):
        add(client, "a", [1], 2)
    listener.lost.get(timeout=WAIT_S)
    listener.lost.get(timeout=WAIT_S)
    client.close()


def test_an_engine_that_was_replaced_is_started_once(listener: Listener, tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps({"manifest_sha256": "another"}))
    command = [sys.executable, "-m", "kvforge.serving.engine.process", str(tmp_path), "--server-pid", str(os.getpid())]
    client = EngineClient([*command, "--options", to_text(EngineOptions(manifest_sha256="abc"))], listener)
    with pytest.raises(EngineError, match="was replaced by another one while it was served; restart kvforge serve"):
        client.start()
    assert client.state == "replaced"
    assert "was replaced" in listener.lost.get()
    assert listener.lost.empty()
    client.close()


def test_close_ends_the_process(listener: Listener) -> None:
    client = EngineClient(FAKE, listener)
    client.start()
    assert client.pid is not None
    process = process_id(client.pid)
    assert process is not None
    client.close()
    client.close()
    assert wait_gone([process], timeout_s=WAIT_S) == []
    assert listener.lost.empty()


def test_an_engine_that_does_not_load_says_why(listener: Listener, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvforge.serving.engine.process", str(tmp_path), "--server-pid", str(os.getpid())]
    client = EngineClient(command, listener)
    with pytest.raises(EngineError, match="is not an engine directory"):
        client.start()
    with pytest.raises(EngineError, match="is not an engine directory"):
        client.send(client.encode({"op": "abort", "id": "a"}))
    client.close()
