"""Prompt lookup: what followed the newest tokens where they last stood in the sequence.

After prompt lookup decoding (Saxena 2023) and vLLM's "ngram"; the index is that of LZ77 coders.
"""

import numpy as np

from kvforge.manifest import Manifest
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.drafter import Draft, Drafter

MAX_CANDIDATES = 64
MISSES, MAX_REST = 4, 7
"""After every ``MISSES`` lookups in a row that found nothing a sequence is left alone for a step more, up to these."""
_MULTIPLIER = 0x9E3779B1
_MASK = 0xFFFFFFFF
_NOTHING = Draft(())


class NgramIndex:
    """Where each n-gram of one sequence stands, for n from ``minimum`` to ``maximum``: at most 20 bytes a token.

    Places of equal hash of their last ``minimum`` tokens are chained, the newest first. A place is the index of the
    token after an n-gram.

    Args:
        tokens: the sequence's token ids, int32; grows in place.
        minimum, maximum: shortest and longest n-gram.
    """

    def __init__(self, tokens: np.ndarray, minimum: int, maximum: int) -> None:
        self._tokens, self._minimum, self._maximum = tokens, minimum, maximum
        self._bits = len(tokens).bit_length() + 1
        self._newest = np.full(1 << self._bits, -1, dtype=np.int32)
        self._older = np.full(len(tokens), -1, dtype=np.int32)
        # Single numbers are read from and written to memoryviews in half the time.
        self._token_view, self._newest_view, self._older_view = tokens.data, self._newest.data, self._older.data
        self.num_misses = self.num_resting = 0
        self._end = minimum
        """Places below this are in the chains."""

    def extend(self, length: int) -> None:
        """Index all places of the first ``length`` tokens that have a token there, once; ``length`` may also shrink,
        after which the tokens may be others."""
        if self._minimum < self._end and length < self._end:
            self._newest.fill(-1)
            self._end = self._minimum
        if length - self._end > 32:
            self._extend_by_many(length)
        newest, older = self._newest_view, self._older_view
        while self._end < length:
            bucket = self._bucket(self._end)
            older[self._end] = newest[bucket]
            newest[bucket] = self._end
            self._end += 1

    def longest(self, length: int) -> int:
        """Return the place whose tokens before it agree longest with the last of ``length`` tokens, the newest such; -1
        where no ``minimum`` agree. Looks at the newest ``MAX_CANDIDATES`` places; ``extend(length)`` comes before."""
        if length <= self._minimum:
            return -1
        place = self._newest_view[self._bucket(length)]
        if place < 0:
            return -1
        tokens, older, maximum = self._token_view, self._older_view, self._maximum
        wanted = tokens[max(length - maximum, 0) : length].tolist()[::-1]
        best, best_size = -1, self._minimum - 1
        for _ in range(MAX_CANDIDATES):
            size = 0
            for token in wanted[:place]:
                if tokens[place - 1 - size] != token:
                    break
                size += 1
            if size > best_size:
                best, best_size = place, size
                if size == len(wanted):
                    break
            place = older[place]
            if place < 0:
                break
        return best

    def _bucket(self, place: int) -> int:
        value = 0
        for token in self._token_view[place - self._minimum : place]:
            value = ((value ^ token) * _MULTIPLIER) & _MASK
        return value >> (32 - self._bits)

    def _extend_by_many(self, length: int) -> None:
        places = np.arange(self._end, length, dtype=np.int32)
        values = np.zeros(len(places), dtype=np.uint64)
        for offset in range(self._minimum, 0, -1):
            tokens = self._tokens[places - offset].astype(np.uint64)
            values = ((values ^ tokens) * np.uint64(_MULTIPLIER)) & np.uint64(_MASK)
        buckets = (values >> np.uint64(32 - self._bits)).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        places, buckets = places[order], buckets[order]
        follows = np.zeros(len(places), dtype=bool)
        follows[1:] = buckets[1:] == buckets[:-1]
        self._older[places] = np.where(follows, np.roll(places, 1), self._newest[buckets])
        self._newest[buckets] = places  # of equal buckets the last one stays: the newest place
        self._end = length


class PromptLookup:
    """Drafts what followed the longest run of a sequence's newest tokens that it holds already.

    Of runs of ``prompt_lookup_max`` down to ``prompt_lookup_min`` tokens the longest counts, of its occurrences the
    newest. Where that lies less than a draft back, the draft goes on with its own beginning: a loop is drafted whole.
    Lookups that keep failing become rarer, until one succeeds.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._minimum, self._maximum = config.prompt_lookup_min, config.prompt_lookup_max
        self._indices: dict[Sequence, NgramIndex] = {}

    def draft(self, sequences: list[Sequence], counts: list[int]) -> list[Draft]:
        """Return a draft of ``counts[i]`` tokens for each sequence that has such a run, of none for others."""
        return [self._look_up(*pair) for pair in zip(sequences, counts, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        """Free the sequence's index; it is made anew when it is asked for."""
        self._indices.pop(sequence, None)

    def find(self, sequence: Sequence) -> int:
        """Return the place of ``NgramIndex.longest`` in the sequence, -1 for none or where it was not looked for."""
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex(sequence.tokens, self._minimum, self._maximum)
        if index.num_resting:
            index.num_resting -= 1
            return -1
        index.extend(sequence.length)
        place = index.longest(sequence.length)
        if place < 0:
            index.num_misses += 1
            index.num_resting = min(index.num_misses // MISSES, MAX_REST)
        else:
            index.num_misses = 0
        return place

    def _look_up(self, sequence: Sequence, count: int) -> Draft:
        place = self.find(sequence)
        return _NOTHING if place < 0 else draft_from(sequence, place, count)


def draft_from(sequence: Sequence, place: int, count: int) -> Draft:
    """Return ``count`` tokens from a place of the sequence on; where it ends, they begin again there."""
    found = sequence.tokens[place : min(place + count, sequence.length)].tolist()
    period = len(found)
    return Draft(tuple(found) if period == count else tuple(found[i % period] for i in range(count)))


def make_drafter(config: SpeculativeConfig, manifest: Manifest, runtime: RuntimeConfig) -> Drafter:
    """Return prompt lookup; it needs nothing of the engine."""
    return PromptLookup(config)
