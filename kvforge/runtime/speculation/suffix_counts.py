"""What followed each run of tokens, and how often: a suffix trie that is kept at the depths ``DEPTHS`` alone.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975). A run is the bytes of its int32 token ids, so that a depth of
the trie is one look-up, and nothing is found by a hash alone.
"""

from collections import deque

import numpy as np

DEPTHS = (6, 2)
"""Lengths of the runs, the longest first."""
MIN_CHANCE = 0.2
"""A draft ends before a token that is less probable than this, all before it taken into account."""
UNSEEN = 2.0
"""What else might follow, over the length of the run: behind two tokens that were there once, as often as what did."""
_TOKEN_BYTES = 4
_SIZES = tuple((depth, depth * _TOKEN_BYTES) for depth in DEPTHS)
_ONE = 1 << 32
_COUNT = _ONE - 1


def chance(depth: int, count: int = 1, total: int = 1) -> float:
    """Return how probable a token is that followed a run of ``depth`` tokens ``count`` of ``total`` times."""
    return count / (total + UNSEEN / depth)


class _Followers:
    """Several tokens that followed a run: their counts, the one counted last behind, the sum of all, and the most
    frequent token, of equal ones the newest."""

    __slots__ = ("best", "counts", "total")

    def __init__(self, token: int, count: int) -> None:
        self.counts, self.total, self.best = {token: count}, count, token

    def add(self, token: int) -> None:
        count = self.counts.pop(token, 0) + 1
        self.counts[token] = count
        self.total += 1
        if count >= self.counts[self.best]:
            self.best = token

    def remove(self, token: int) -> None:
        self.total -= 1
        if self.counts[token] > 1:
            self.counts[token] -= 1
        else:
            del self.counts[token]
        if token == self.best:
            self.best = max(reversed(self.counts), key=self.counts.__getitem__)


_Table = dict[bytes, int | _Followers]
"""By run: a single follower as ``token * _ONE + count``, or several."""


class SuffixCounts:
    """Counts of the newest ``max_tokens`` tokens of all scopes together, the oldest of which leave first: at most about
    500 bytes a token. Each scope has a table of its own, so that nothing of one is found from another."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tables: dict[str, _Table] = {}
        self._added: deque[tuple[str, bytes, int]] = deque()

    def __len__(self) -> int:
        """Tokens that are counted."""
        return len(self._added)

    def add(self, scope: str, tokens: np.ndarray, start: int, end: int) -> None:
        """Count the tokens [int32] from ``start`` to before ``end`` behind those before them."""
        first = max(start - DEPTHS[0], 0)
        data = tokens[first:end].tobytes()
        for place, token in enumerate(tokens[start:end].tolist(), start - first):
            context = data[max(place - DEPTHS[0], 0) * _TOKEN_BYTES : place * _TOKEN_BYTES]
            table = self._tables.setdefault(scope, {})
            for _, size in _SIZES:
                run = context[-size:]
                if len(run) < size:
                    continue
                found = table.get(run)
                if found is None:
                    table[run] = token * _ONE + 1
                elif not isinstance(found, int):
                    found.add(token)
                elif found >> 32 == token:
                    table[run] = found + 1
                else:
                    table[run] = followers = _Followers(found >> 32, found & _COUNT)
                    followers.add(token)
            self._added.append((scope, context, token))
            if len(self._added) > self._max_tokens:
                self._remove(*self._added.popleft())

    def draft(self, scope: str, tokens: np.ndarray, length: int, count: int) -> tuple[list[int], list[float]]:
        """Return at most ``count`` tokens to follow the first ``length`` of ``tokens`` [int32], and the chance of each
        once those before it are right. Each is the most frequent one behind the longest run that was followed by any.
        """
        drafted: list[int] = []
        chances: list[float] = []
        table, probability = self._tables.get(scope), 1.0
        if table is None:
            return drafted, chances
        context = tokens[max(length - DEPTHS[0], 0) : length].tobytes()
        while len(drafted) < count:
            depth, token, times, total = _follow(table, context)
            if not depth:
                break
            likely = chance(depth, times, total)
            probability *= likely
            if probability < MIN_CHANCE:
                break
            drafted.append(token)
            chances.append(likely)
            context += token.to_bytes(_TOKEN_BYTES, "little")
        return drafted, chances

    def _remove(self, scope: str, context: bytes, token: int) -> None:
        table = self._tables.get(scope, {})  # without one where too few tokens came before all that is kept of it
        for _, size in _SIZES:
            run = context[-size:]
            if len(run) < size:
                continue
            found = table[run]
            if not isinstance(found, int):
                found.remove(token)
                if len(found.counts) == 1:
                    table[run] = found.best * _ONE + found.total
            elif found & _COUNT > 1:
                table[run] = found - 1
            else:
                del table[run]
        if not table:
            self._tables.pop(scope, None)


def _follow(table: _Table, context: bytes) -> tuple[int, int, int, int]:
    """Return (depth, token, count, total) of the longest run at the end of ``context`` that is in the table; depth 0
    where there is none."""
    for depth, size in _SIZES:
        run = context[-size:]
        found = table.get(run)
        if found is None or len(run) < size:
            continue
        if isinstance(found, int):
            count = found & _COUNT
            return depth, found >> 32, count, count
        return depth, found.best, found.counts[found.best], found.total
    return 0, 0, 0, 0
