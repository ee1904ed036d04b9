"""Who waits is served in order by few threads, and can be taken out as long as nobody has begun with it."""

import threading
from functools import partial

from kvforge.serving.text_models.waiting_room import WaitingRoom

WAIT_S = 60.0


class Guest:
    pass


def test_in_order_and_each_once() -> None:
    room: WaitingRoom[Guest] = WaitingRoom(1, "room")
    done: list[int] = []
    ended = threading.Event()
    for number in range(100):
        room.put(Guest(), partial(done.append, number))
    room.put(Guest(), ended.set)
    assert ended.wait(WAIT_S)
    assert done == list(range(100))
    room.close(WAIT_S)


def test_as_many_at_once_as_there_are_threads() -> None:
    room: WaitingRoom[Guest] = WaitingRoom(3, "room")
    together = threading.Barrier(4)  # with fewer threads nobody would come through
    for _ in range(3):
        room.put(Guest(), together.wait)
    together.wait(WAIT_S)
    assert room.guests() == []
    room.close(WAIT_S)


def test_who_was_taken_out_is_never_begun_with() -> None:
    room: WaitingRoom[Guest] = WaitingRoom(1, "room")
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        go_on.wait(WAIT_S)

    guests = [Guest() for _ in range(3)]
    served: list[int] = []
    room.put(guests[0], first)
    assert begun.wait(WAIT_S)
    room.put(guests[1], partial(served.append, 1))
    room.put(guests[2], ended.set)
    assert room.guests() == guests[1:]
    assert not room.take_out(guests[1], where=lambda guest: False)
    assert room.take_out(guests[1]) and not room.take_out(guests[1])
    assert not room.take_out(guests[0]), "it has begun"
    go_on.set()
    assert ended.wait(WAIT_S)
    assert served == []
    room.close(WAIT_S)


def test_a_job_that_fails_costs_no_thread() -> None:
    room: WaitingRoom[Guest] = WaitingRoom(1, "room")
    ended = threading.Event()

    def fail() -> None:
        raise SystemExit

    room.put(Guest(), fail)
    room.put(Guest(), ended.set)
    assert ended.wait(WAIT_S)
    room.close(WAIT_S)


def test_nothing_begins_once_it_is_closed() -> None:
    room: WaitingRoom[Guest] = WaitingRoom(1, "room")
    room.close(WAIT_S)
    served = threading.Event()
    guest = Guest()
    room.put(guest, served.set)
    assert not served.wait(0.05) and room.guests() == [guest]
