"""Sender threads: one that does not come back from tritonserver is noticed, one that is only slow is not."""

import threading
import time
from dataclasses import dataclass

import pytest

from kvforge.serving.stub import sender_pool
from kvforge.serving.stub.sender_pool import LOOK_PERIOD_S, SenderPool, SendWatch


@dataclass
class Request:
    key: int
    scheduled: bool = False


def test_a_send_that_does_not_end_is_noticed_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_pool, "HUNG_S", 0.05)
    monkeypatch.setattr(sender_pool, "LOOK_PERIOD_S", 0.02)
    release, hung, sent = threading.Event(), threading.Event(), threading.Event()

    def send(request: Request) -> None:
        if request.key:
            sent.set()
        else:
            release.wait()

    pool: SenderPool[Request] = SenderPool(send, on_hung=hung.set)
    pool.schedule(Request(1))
    assert sent.wait(60)
    sent.clear()
    pool.schedule(Request(0))
    assert hung.wait(60)
    pool.schedule(Request(2))
    assert sent.wait(60)
    release.set()
    pool.close()


def test_only_time_within_one_response_counts() -> None:
    sends = [0, 0]
    watch = SendWatch(sends)
    now = 1000.0

    def look(seconds: float = LOOK_PERIOD_S) -> float:
        nonlocal now
        now += seconds
        return watch.longest_s(now)

    assert look() == look() == 0.0
    sends[1] = 1
    assert look() == 0.0, "begun between two looks"
    assert look() == LOOK_PERIOD_S
    assert look(3600.0) == 3 * LOOK_PERIOD_S, "this process stood still"
    sends[1] += 2
    assert look() == 0.0, "one of its responses has left"
    assert look() == LOOK_PERIOD_S
    sends[0] = 5
    sends[1] += 1
    assert look() == 0.0
    assert look() == LOOK_PERIOD_S, "the other thread's"


def test_a_send_of_several_responses_says_that_it_goes_on() -> None:
    done = threading.Event()
    seen: list[list[int]] = []

    def send(request: Request) -> None:
        for _ in range(3):
            pool.goes_on()
            seen.append(list(pool._sends))
        done.set()

    pool: SenderPool[Request] = SenderPool(send, num_threads=1)
    pool.schedule(Request(0))
    assert done.wait(60)
    pool.close()
    assert seen == [[3], [5], [7]] and pool._sends == [8]


def test_what_is_scheduled_again_while_the_pool_closes_is_sent() -> None:
    waiting = {0: list(range(5)), 1: list(range(5))}
    sent: dict[int, list[int]] = {0: [], 1: []}
    begun, closing = threading.Event(), threading.Event()

    def send(request: Request) -> None:
        begun.set()
        assert closing.wait(60)
        sent[request.key].append(waiting[request.key].pop(0))
        if waiting[request.key]:
            pool.schedule(request)

    pool: SenderPool[Request] = SenderPool(send, num_threads=1)
    first, second = Request(0), Request(1)
    pool.schedule(first)
    assert begun.wait(60)
    pool.schedule(second)
    closer = threading.Thread(target=pool.close)
    closer.start()
    while pool._queue.qsize() < 2:  # the second request, and the end
        time.sleep(0.001)
    closing.set()
    closer.join()
    assert sent == {0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3, 4]}
    assert not first.scheduled and not second.scheduled
