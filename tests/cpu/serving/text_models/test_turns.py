"""The text server: who waits for a thread or for a turn of sending, also while its model is unloaded."""

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.contract.text_rows import REQUEST_END, SEQUENCE_END
from kvforge.serving.stub.sender_pool import SenderPool
from kvforge.serving.text_models.bls import MAX_PIECES
from tests.support.serving.text_triton import (
    FINAL_FLAG,
    LIMIT_US,
    Say,
    Sender,
    Triton,
    failed,
    make_request,
    make_server,
    serve,
    three_pieces,
    wait,
)


def test_tokens_that_come_as_fast_as_they_leave_do_not_hold_up_others(tmp_path: Path) -> None:
    class Endless(Sender):
        """For each response that leaves another row comes, until the other request has had its end."""

        inputs: dict

        def send(self, response: Any = None, flags: int = 0) -> None:
            super().send(response, flags)
            if flags != FINAL_FLAG:
                triton.say(self.inputs, [65], SEQUENCE_END | REQUEST_END if other.sent else 0)

    def script(triton: Triton, inputs: dict, say: Say) -> list[SimpleNamespace]:
        if len(triton.calls) == 1:
            endless.inputs = inputs
            say(inputs, [65], 0)
            return []
        return three_pieces(tmp_path)(triton, inputs, say)

    triton, server = make_server(tmp_path, script)
    server._senders = SenderPool(server._send, num_threads=1)
    endless, other = Endless(), Sender()
    server.execute([make_request(endless)])
    wait(lambda: len(endless.sent) > 1)
    server.execute([make_request(other)])
    wait(lambda: server._admission.num_open == 0)
    server.close()
    assert other.texts == ["a", "b", "c"]
    assert len(set(endless.texts)) == 1 and endless.error is None


def test_who_is_served_when_the_model_is_unloaded_is_told_why_behind_what_there_is(tmp_path: Path) -> None:
    num_rows = 3 * MAX_PIECES
    first_left, go_on = threading.Event(), threading.Event()

    class Slow(Sender):
        def send(self, response: Any = None, flags: int = 0) -> None:
            first_left.set()
            assert go_on.wait(60)
            super().send(response, flags)

    def script(triton: Triton, inputs: dict, say: Say) -> Iterator[SimpleNamespace]:
        for _ in range(num_rows):
            say(inputs, [65], 0)
        wait(lambda: triton.cancelled)
        go_on.set()
        yield failed(triton, "cancelled", "the request was cancelled")

    _, server = make_server(tmp_path, script)
    server._senders = SenderPool(server._send, num_threads=1)
    sender = Slow()
    server.execute([make_request(sender)])
    assert first_left.wait(60)
    server.close()
    assert [flags for _, flags in sender.sent] == [0] * num_rows + [FINAL_FLAG]
    assert "shutting down" in sender.error.message()


def test_who_has_a_thread_once_the_model_is_being_unloaded_is_told_why(tmp_path: Path) -> None:
    _, server = make_server(tmp_path, three_pieces(tmp_path))
    server._closing.set()
    sender = Sender()
    server.execute([make_request(sender)])
    wait(lambda: server._admission.num_open == 0)
    server.close()
    assert server._open == {}
    assert len(sender.sent) == 1 and "shutting down" in sender.error.message()


def test_who_waits_for_a_thread_is_looked_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline, a client that goes, and a drain, while the only thread is with another request."""
    monkeypatch.setattr("kvforge.serving.text_models.bls.MAX_THREADS", 1)
    go_on = threading.Event()

    def script(triton: Triton, inputs: dict, say: Say) -> list[SimpleNamespace]:
        go_on.wait(60)
        say(inputs, [65], SEQUENCE_END | REQUEST_END)
        return [triton.InferenceResponse([])]

    triton, server = make_server(tmp_path, script)
    first, late, left, patient, refused = (Sender() for _ in range(5))
    server.execute([make_request(first)])
    wait(lambda: triton.calls)
    server.execute([make_request(late, limit_us=1000), make_request(left), make_request(patient)])
    wait(lambda: late.sent)
    assert "deadline has passed" in late.error.message()
    left.gone = True
    wait(lambda: left.sent)
    assert left.error.code() == Triton.TritonError.CANCELLED
    wait(lambda: triton.told_open[-1:] == [2])
    (tmp_path / "drain").write_text(json.dumps({"deadline_s": 60}))
    wait(lambda: server._admission.closed)
    server.execute([make_request(refused)])
    assert "shutting down" in refused.error.message()
    go_on.set()
    wait(lambda: server._admission.num_open == 0)
    assert first.texts == patient.texts == [Tokenizer.from_dir(tmp_path).decode([65])]
    assert len(triton.calls) == 2
    server.close()


def test_a_drain_ends_who_waits_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvforge.serving.text_models.bls.MAX_THREADS", 1)
    go_on = threading.Event()

    def script(triton: Triton, inputs: dict, say: Say) -> list[SimpleNamespace]:
        go_on.wait(60)
        return [failed(triton, "unavailable", "the server is shutting down")]

    triton, server = make_server(tmp_path, script)
    senders = [Sender() for _ in range(4)]
    server.execute([make_request(sender) for sender in senders[:3]])
    wait(lambda: triton.calls)
    (tmp_path / "drain").write_text(json.dumps({"deadline_s": 0}))
    wait(lambda: senders[1].sent and senders[2].sent)
    assert all("shutting down" in sender.error.message() for sender in senders[1:3])
    go_on.set()
    wait(lambda: server._admission.num_open == 0)
    assert len(triton.calls) == 1
    server.close()


def test_the_wait_for_a_thread_counts_towards_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(step=2 * LIMIT_US / 1e6)
    monkeypatch.setattr(
        "kvforge.serving.text_models.bls.time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda s: None)
    )
    triton, sender = serve(tmp_path, lambda triton, inputs, say: [])
    assert triton.calls == []
    assert sender.error.message() == "the request's deadline has passed: its timeout was 60 s"
