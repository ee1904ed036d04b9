"""Suffix decoding: what most often followed the newest tokens, in the sequence itself and in texts of other requests.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975), whose draft is likewise the one with the most expected tokens.
"""

from collections import deque
from dataclasses import replace
from functools import cache
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from kvforge.manifest import Manifest
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence, Status
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.drafter import Draft, Drafter
from kvforge.runtime.speculation.prompt_lookup import PromptLookup, draft_from
from kvforge.runtime.speculation.suffix_counts import DEPTHS, SuffixCounts, chance

BACKLOG = 16
CATCH_UP = 8
"""Of outputs that ended, so many tokens are counted with each draft."""


class SuffixDrafter:
    """Drafts from the sequence itself as ``PromptLookup`` does, and from outputs of its scope by their counts, running
    ones included; the draft with more expected tokens counts. An output's tokens are counted once: as they come, or
    where more than ``BACKLOG`` have come without drafting, behind its end: ``CATCH_UP`` with each draft, those of the
    newest output first. So what counting takes is part of what drafting takes, and where drafting rests most are left.

    Scopes never see one another. Without sharing every sequence is by itself and nothing is counted.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._sharing = config.suffix_sharing
        self._counts, self._max_tokens = SuffixCounts(config.suffix_max_tokens), config.suffix_max_tokens
        self._ended: deque[tuple[str, np.ndarray, int]] = deque()
        """Scopes, tokens of outputs behind some that are counted or of the prompt, and how many these are."""
        self._num_ended = 0
        lookup = SpeculativeConfig("ngram", prompt_lookup_min=DEPTHS[-1], prompt_lookup_max=DEPTHS[0])
        self._lookup = PromptLookup(lookup)

    def draft(self, sequences: list[Sequence], counts: list[int]) -> list[Draft]:
        """Return a draft of at most ``counts[i]`` tokens for each sequence, of none where nothing is found."""
        for sequence in sequences:
            if sequence.length - sequence.num_counted <= BACKLOG:
                self._count(sequence)
        self._catch_up(CATCH_UP * len(sequences))
        return [self._draft(*pair) for pair in zip(sequences, counts, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        """Free the sequence's index, and when it is finished keep the rest of its output to be counted."""
        self._lookup.forget(sequence)
        scope = self._scope(sequence)
        if scope is None or sequence.status is not Status.FINISHED or sequence.num_counted == sequence.length:
            return
        start = max(sequence.num_counted, sequence.length - self._max_tokens)
        self._keep(scope, sequence.tokens[: sequence.length], start)
        self._num_ended += sequence.length - start
        sequence.num_counted = sequence.length
        while self._num_ended > self._max_tokens:
            _, tokens, start = self._ended.popleft()
            self._num_ended -= len(tokens) - start

    def stats(self) -> dict[str, Any]:
        """Return the tokens of outputs that are kept for other requests, by name."""
        return {"suffix_num_tokens": len(self._counts)}

    def _scope(self, sequence: Sequence) -> str | None:
        if self._sharing == "all":
            return ""
        return sequence.params.draft_scope or None if self._sharing == "scope" else None

    def _count(self, sequence: Sequence) -> None:
        scope = self._scope(sequence)
        if scope is not None:
            self._counts.add(scope, sequence.tokens, sequence.num_counted, sequence.length)
            sequence.num_counted = sequence.length

    def _catch_up(self, count: int) -> None:
        """Count so many tokens of outputs that ended."""
        while count > 0 and self._ended:
            scope, tokens, start = self._ended.pop()
            end = min(start + count, len(tokens))
            self._counts.add(scope, tokens, start, end)
            if end < len(tokens):
                self._keep(scope, tokens, end)
            self._num_ended -= end - start
            count -= end - start

    def _keep(self, scope: str, tokens: np.ndarray, start: int) -> None:
        """Keep the tokens from ``start`` on to be counted, and of those before them what runs need."""
        before = min(start, DEPTHS[0])
        self._ended.append((scope, tokens[start - before :].copy(), before))

    def _draft(self, sequence: Sequence, count: int) -> Draft:
        scope = self._scope(sequence)
        tokens, chances = list[int](), list[float]()
        if scope is not None:
            tokens, chances = self._counts.draft(scope, sequence.tokens, sequence.length, count)
        expected = sum(accumulate(chances, mul))
        if expected < _single(DEPTHS[0], count)[1]:
            place = self._lookup.find(sequence)
            if place >= 0:
                own, more = _single(_agreement(sequence, place), count)
                if more > expected:
                    return replace(draft_from(sequence, place, count), chances=own)
        return Draft(tuple(tokens), chances=tuple(chances))


def _agreement(sequence: Sequence, place: int) -> int:
    """Return how many tokens before a place, at most ``DEPTHS[0]``, are the sequence's newest."""
    view, end = sequence.tokens.data, sequence.length
    for depth in range(min(place, DEPTHS[0])):
        if view[place - 1 - depth] != view[end - 1 - depth]:
            return depth
    return min(place, DEPTHS[0])


@cache
def _single(depth: int, count: int) -> tuple[tuple[float, ...], float]:
    """Return the chances of ``count`` tokens that were once behind a run of ``depth``, and how many are expected to be
    right."""
    chances = tuple(chance(min(depth + more, DEPTHS[0])) for more in range(count))
    return chances, sum(accumulate(chances, mul))


def make_drafter(config: SpeculativeConfig, manifest: Manifest, runtime: RuntimeConfig) -> Drafter:
    """Return suffix decoding; it needs nothing of the engine."""
    return SuffixDrafter(config)
