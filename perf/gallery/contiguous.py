"""Systems that give each request one piece of the cache, reserved at once: what vLLM's paper compares paging with."""

from collections.abc import Callable
from dataclasses import dataclass

from perf.gallery.requests import MAX_SEQ_LEN

Reserve = Callable[[int, int], int]
"""From tokens of the prompt and of the output to those that are reserved."""


def next_power(number: int) -> int:
    """Return the least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


RESERVES: dict[str, Reserve] = {
    "one piece, longest": lambda num_input, num_output: MAX_SEQ_LEN,
    "one piece, power of 2": lambda num_input, num_output: min(num_input + next_power(num_output), MAX_SEQ_LEN),
    "one piece, known length": lambda num_input, num_output: num_input + num_output,
}
"""Orca's three allocations in that paper: the longest that there is, the output's next power of two, an oracle."""


@dataclass
class Piece:
    """Slots ``start`` to ``start + reserved`` of a request that will have ``final`` tokens and has ``tokens`` now."""

    start: int
    reserved: int
    final: int
    tokens: int


@dataclass(frozen=True)
class Usage:
    """Slots of the cache at one moment: with tokens, for tokens to come, in a piece or page and never used, outside."""

    tokens: int
    reserved: int
    inside: int
    outside: int
    num_running: int


def first_fit(pieces: list[Piece], num_slots: int, size: int) -> int | None:
    """Return where the first gap of ``size`` slots begins between ``pieces``, which are in order; None without one."""
    start = 0
    for piece in pieces:
        if piece.start - start >= size:
            return start
        start = piece.start + piece.reserved
    return start if num_slots - start >= size else None


def serve_contiguous(requests: list[tuple[int, int]], num_slots: int, reserve: Reserve) -> list[Usage]:
    """Serve requests that are all there at the beginning, a token of each running one a step and each prompt in one;
    returns the usage of the steps in which requests wait. Nothing overtakes the first that waits."""
    waiting, pieces = list(reversed(requests)), list[Piece]()
    usage = []
    while waiting or pieces:
        while waiting:
            num_input, num_output = waiting[-1]
            size = reserve(num_input, num_output)
            start = first_fit(pieces, num_slots, size)
            if start is None:
                break
            pieces.append(Piece(start, size, num_input + num_output, num_input - 1))
            pieces.sort(key=lambda piece: piece.start)
            waiting.pop()
        for piece in pieces:
            piece.tokens += 1
        if waiting:
            usage.append(_usage(pieces, num_slots))
        pieces = [piece for piece in pieces if piece.tokens < piece.final - 1]  # the last token is not computed
    return usage


def _usage(pieces: list[Piece], num_slots: int) -> Usage:
    tokens, final, reserved = (
        sum(getattr(piece, name) for piece in pieces) for name in ("tokens", "final", "reserved")
    )
    computed = final - len(pieces)
    return Usage(tokens, computed - tokens, reserved - computed, num_slots - reserved, len(pieces))
