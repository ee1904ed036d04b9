"""The connection of stub and text model: rows arrive as they were, and each side learns of the other's end."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvforge.common.errors import EngineError
from kvforge.serving.contract.text_rows import REQUEST_END, RowMessage, TextRow, socket_path
from kvforge.serving.stub.text_links import TextLinks
from kvforge.serving.text_models.engine_link import EngineLink

WAIT_S = 60.0
LANE = 1


class Ends:
    """A listener, a connection to it, and what both were told."""

    def __init__(self, folder: Path) -> None:
        self.cancelled: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.gone: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.rows: queue.SimpleQueue[TextRow] = queue.SimpleQueue()
        self.lost = threading.Event()
        self.links = TextLinks(socket_path(folder), self.cancelled.put, self.gone.put)
        self.link = EngineLink(socket_path(folder), LANE, self._take, self.lost.set)

    def _take(self, rows: list[TextRow]) -> None:
        for row in rows:
            self.rows.put(row)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.link.close()
    made.links.close()


def message(key: int, tokens: list[int], **arrays: np.ndarray) -> RowMessage:
    made = RowMessage()
    made.add(key, 2, REQUEST_END, tokens, [7], arrays)
    return made


def test_rows_arrive_in_order_with_their_arrays(ends: Ends) -> None:
    assert not ends.links.has(LANE)
    ends.link.connect()
    ends.link.connect()  # once is enough
    assert ends.links.has(LANE)
    logits = np.random.default_rng(0).normal(size=(1, 1, 700, 1000)).astype(np.float32)  # more than a socket holds
    arrays = {"generation_logits": logits, "sequence_index": np.array([[3]], np.int32)}
    both = message(5, [1, 2], **arrays)
    both.add(6, 0, 0, [], [], {"cum_log_probs": np.array([[-1.5]], np.float32)})
    ends.links.send(LANE, both)
    for token in range(1000):
        ends.links.send(LANE, message(5, [token]))
    first, second = (ends.rows.get(timeout=WAIT_S) for _ in range(2))
    assert (first.key, first.sequence, first.flags, first.tokens, first.context) == (5, 2, REQUEST_END, [1, 2], [7])
    assert {name: (a.dtype, a.shape) for name, a in first.arrays.items()} == {
        name: (a.dtype, a.shape) for name, a in arrays.items()
    }
    assert all(np.array_equal(first.arrays[name], arrays[name]) for name in arrays)
    assert second.arrays["cum_log_probs"].tolist() == [[-1.5]] and not second.ends_request
    assert [ends.rows.get(timeout=WAIT_S).tokens for _ in range(1000)] == [[token] for token in range(1000)]


def test_a_cancel_arrives_and_an_end_is_told_to_both_sides(ends: Ends) -> None:
    ends.link.connect()
    ends.link.cancel(2**62 - 1)
    assert ends.cancelled.get(timeout=WAIT_S) == 2**62 - 1
    ends.link.close()
    assert ends.gone.get(timeout=WAIT_S) == LANE
    assert ends.lost.wait(WAIT_S)
    ends.links.send(LANE, message(1, [1]))  # to nobody
    ends.link.cancel(1)
    ends.lost.clear()
    ends.link.connect()
    ends.links.close()
    assert ends.lost.wait(WAIT_S)


def test_a_lane_in_use_is_not_taken_over(ends: Ends, tmp_path: Path) -> None:
    ends.link.connect()
    with pytest.raises(EngineError, match="cannot be reached"):
        EngineLink(socket_path(tmp_path), LANE, ends._take, ends.lost.set).connect()
    ends.links.send(LANE, message(5, [1]))
    assert ends.rows.get(timeout=WAIT_S).tokens == [1] and ends.links.has(LANE)
    ends.link.close()
    assert ends.gone.get(timeout=WAIT_S) == LANE
    ends.link.connect()
    assert ends.links.has(LANE)


def test_open_requests_are_those_that_came_and_those_that_wait(ends: Ends) -> None:
    assert ends.links.num_open({LANE: 2}) == 2
    ends.link.tell_open(5)
    deadline = time.monotonic() + WAIT_S
    while ends.links.num_open({}) != 5:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert ends.links.num_open({LANE: 2, LANE + 1: 3}) == 8
    assert ends.links.num_open({LANE: 7}) == 7


def test_nobody_listens(tmp_path: Path) -> None:
    def nothing(*arguments: Any) -> None:
        pass

    with pytest.raises(EngineError, match="cannot be reached"):
        EngineLink(socket_path(tmp_path), LANE, nothing, nothing).connect()


def test_what_is_no_message_ends_its_connection_alone(ends: Ends, tmp_path: Path) -> None:
    import socket

    ends.link.connect()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.connect(str(socket_path(tmp_path)))
        other.sendall(b"\xff" * 64)
        other.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):  # it was closed with bytes unread
            assert other.recv(1) == b""
    ends.links.send(LANE, message(5, [1]))
    assert ends.rows.get(timeout=WAIT_S).tokens == [1]
