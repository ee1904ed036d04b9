"""Framing: whole messages whatever the pieces, and nothing but plain messages."""

import socket
import struct
import threading

import pytest

from kvforge.serving.engine.protocol import BLOB, MAX_MESSAGE_BYTES, ProtocolError, encode, encode_head, receive


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_round_trip_byte_by_byte(pair) -> None:
    ours, theirs = pair
    messages = [{"op": "add", "id": "é", "prompt": list(range(500))}, {"op": "stats", "stats": {"x": float("inf")}}]
    data = b"".join(map(encode, messages))
    sender = threading.Thread(target=lambda: [ours.sendall(data[i : i + 1]) for i in range(len(data))], daemon=True)
    sender.start()
    assert [receive(theirs), receive(theirs)] == messages


def test_bytes_travel_behind_the_message(pair) -> None:
    ours, theirs = pair
    ours.sendall(encode({"op": "tokens", "outputs": []}, b"\x00\xff" * 300) + encode({"op": "close"}))
    assert receive(theirs) == {"op": "tokens", "outputs": [], BLOB: b"\x00\xff" * 300}
    assert receive(theirs) == {"op": "close"}


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match=f"over the limit of {MAX_MESSAGE_BYTES}"):
        encode({"op": "add", "prompt": "1" * MAX_MESSAGE_BYTES})
    with pytest.raises(ProtocolError, match="over the limit of 100"):
        encode_head({"op": "add"}, 90, limit=100)


def test_a_closed_peer_is_none_even_within_a_message(pair) -> None:
    ours, theirs = pair
    ours.sendall(encode({"op": "close"})[:-1])
    ours.close()
    assert receive(theirs) is None


@pytest.mark.parametrize("body", [b"not json", b"[1]", b'{"id": 1}', b'{"op": 1}', b"\xff\xfe"])
def test_what_is_no_message_is_an_error(pair, body: bytes) -> None:
    ours, theirs = pair
    ours.sendall(struct.pack("<II", len(body), 0) + body)
    with pytest.raises(ProtocolError):
        receive(theirs)


@pytest.mark.parametrize("lengths", [(MAX_MESSAGE_BYTES + 1, 0), (2, MAX_MESSAGE_BYTES), (2**32 - 1, 2**32 - 1)])
def test_a_length_over_the_limit_is_refused_before_reading(pair, lengths: tuple[int, int]) -> None:
    ours, theirs = pair
    ours.sendall(struct.pack("<II", *lengths))
    with pytest.raises(ProtocolError, match="limit"):
        receive(theirs)
