"""A grammar's trial: walks through it that look for its slow steps."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvforge.runtime.guides.limits import TRIAL_CPU_S
from kvforge.runtime.guides.messages import message_of

WALK_TOKENS = 48
"""Of a walk, where there was a choice."""
WALK_FORCED_TOKENS = 4096
_CANDIDATES = 12
NEEDS_END = "it asks for a token that ends the text, which no text goes on after, leave it out"

Choice = Callable[[random.Random, np.ndarray, int | None], int]


@dataclass(frozen=True)
class Trial:
    """``problem``: why no text can be generated, else None; ``slowest_s``: processor time of the slowest step;
    ``gave_up``: a walk ran into a limit of the parser; ``contradicts``: the parser refused a token that it had allowed.
    """

    problem: str | None
    slowest_s: float = 0.0
    gave_up: bool = False
    contradicts: bool = False


def try_out(matcher: Any, vocabulary: Any) -> Trial:
    """Walk through a grammar for up to ``TRIAL_CPU_S`` of processor time; ``matcher`` stays at its start.

    A walk takes one of the allowed tokens at each step: any, the same as long as it goes, the shortest, the longest.
    """
    first = matcher.deep_copy()
    if not first.is_error():
        first.compute_bitmask()
    if first.is_error():
        return Trial(message_of(first))
    until = time.thread_time() + TRIAL_CPU_S
    slowest, gave_up, contradicts = 0.0, False, False
    for seed, choose in enumerate((_any, _same, _by_length(vocabulary, min), _by_length(vocabulary, max))):
        rng, walker, last = random.Random(seed), matcher.deep_copy(), None
        num_chosen = 0
        for _ in range(WALK_FORCED_TOKENS):
            started = time.thread_time()
            if started > until:
                return Trial(None, slowest, gave_up, contradicts)
            allowed, may_end = _allowed(walker, vocabulary)
            if may_end and not len(allowed) and not walker.is_accepting():
                return Trial(NEEDS_END)
            if not walker.is_error() and len(allowed):
                last = choose(rng, allowed, last)
                walker.consume_token(last)
                contradicts |= "doesn't satisfy the grammar" in walker.get_error()
            slowest = max(slowest, time.thread_time() - started)
            gave_up |= walker.is_error()
            num_chosen += len(allowed) > 1
            if walker.is_error() or walker.is_stopped() or not len(allowed) or num_chosen == WALK_TOKENS:
                break
    return Trial(None, slowest, gave_up, contradicts)


def _allowed(matcher: Any, vocabulary: Any) -> tuple[np.ndarray, bool]:
    """Ids of the tokens that may follow, without those that end the text, and whether one of these may."""
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    bits = np.unpackbits(mask, bitorder="little", count=vocabulary.vocab_size)
    may_end = bool(bits[vocabulary.eos_tokens].any())
    bits[vocabulary.eos_tokens] = 0
    return np.flatnonzero(bits), may_end


def _any(rng: random.Random, allowed: np.ndarray, last: int | None) -> int:
    return int(allowed[rng.randrange(len(allowed))])


def _same(rng: random.Random, allowed: np.ndarray, last: int | None) -> int:
    if last is not None and last in allowed:
        return last
    return _any(rng, allowed, last)


def _by_length(vocabulary: Any, best: Callable[..., int]) -> Choice:
    def choose(rng: random.Random, allowed: np.ndarray, last: int | None) -> int:
        candidates = [_any(rng, allowed, last) for _ in range(_CANDIDATES)]
        return best(candidates, key=lambda token: len(vocabulary.decode_bytes([token])))

    return choose
