"""Drafters that do what none should, and draft lengths drawn at random."""

from collections import Counter

import torch

from kvforge.runtime.speculation.drafter import Draft

KINDS = ("right", "partly", "wrong", "long", "empty", "foreign", "malformed", "raise")


class AdversarialDrafter:
    """Drafts of every kind, at random; ``expected`` is {(request_id, index): (tokens, …)} and ``forgotten`` counts
    ``forget`` by sequence."""

    def __init__(self, rng, expected, vocab_size=64):
        self._rng, self._expected, self._vocab_size = rng, expected, vocab_size
        self.forgotten = Counter()
        self.num_calls = Counter()

    def draft(self, sequences, counts):
        kind = self._rng.choice(KINDS)
        self.num_calls[kind] += 1
        if kind == "raise":
            raise ZeroDivisionError("this drafter always had its moods")
        drafts = [self._draft(kind, *pair) for pair in zip(sequences, counts, strict=True)]
        return drafts[1:] if kind == "malformed" and self._rng.random() < 0.5 else drafts

    def forget(self, sequence):
        self.forgotten[sequence.request_id, sequence.index] += 1
        if self._rng.random() < 0.1:
            raise ZeroDivisionError("nor does it forget")

    def _draft(self, kind, sequence, count):
        assert sequence.length - sequence.num_computed == 1 <= count
        rng, noise = self._rng, [self._rng.randrange(self._vocab_size) for _ in range(count)]
        future = self._expected[sequence.request_id, sequence.index][0][sequence.num_generated :]
        if kind == "empty":
            return Draft(())
        if kind == "wrong":
            return Draft(tuple((future[0] + 1 + rng.randrange(3) if i == 0 else t) % 64 for i, t in enumerate(noise)))
        if kind == "right":
            return Draft(tuple(future[:count]))
        if kind == "partly":
            place = rng.randint(0, count)
            return Draft((*future[:place], *noise[place:]))
        if kind == "long":
            return Draft((*future, *noise, *noise, *noise))
        if kind == "foreign":
            noise[rng.randrange(count)] = rng.choice([-1, self._vocab_size, 2**31 - 1, 2**40])
            return Draft(tuple(noise))
        return Draft(tuple(noise), torch.ones(count + 1, self._vocab_size))


class RandomLengths:
    """In place of ``DraftLength``: any lengths, whatever was measured."""

    pays_for_prompts = True

    def __init__(self, rng, most):
        self._rng, self._most = rng, most

    def room(self, sequence):
        return min(self._most, sequence.max_length - sequence.length - 1)

    def is_due(self, num_sequences):
        return self._rng.random() < 0.9

    def choose(self, num_sequences, available, chances=None):
        assert num_sequences >= len(available)
        lengths = {sequence: self._rng.randint(0, most) for sequence, most in available.items()}
        return {sequence: length for sequence, length in lengths.items() if length}

    def num_rests(self, num_sequences):
        return self._rng.randint(0, 2)

    def observe(self, num_sequences, results, was_tried, seconds, num_rests=0, looking=0.0):
        assert all(0 <= right <= count <= self._most for count, right in results.values())
        assert num_sequences >= len(results)
        assert looking >= 0

    def add_prompts(self, seconds):
        assert seconds >= 0

    def add_beside_prompts(self, num_sequences, num_drafts, num_right, seconds):
        assert num_sequences > 0 and num_drafts >= num_right >= 0 and seconds >= 0

    def forget(self, sequence):
        pass
