"""How many tokens to draft for each sequence of the next step: what gives most tokens in its time."""

from collections.abc import Mapping

from kvforge.runtime.sequence import Sequence
from kvforge.runtime.speculation.step_cost import StepCost

DECAY = 0.8
"""What a sequence's verified drafts still count after each later one."""
FIRST_RATE = 0.6
GAIN = 1.02
"""Drafting must be this much better than plain decoding."""
MAX_PAUSE = 64
PROBE = 4
PLAIN_PERIOD = 64


class _Rate:
    """Moving share of drafts that were right, of those whose predecessors were."""

    def __init__(self, prior: float) -> None:
        self._right, self._tried = prior, 1.0

    def add(self, num_right: int, num_drafts: int) -> None:
        tried = num_right + (num_right < num_drafts)
        for i in range(tried):
            self._right = self._right * DECAY + (i < num_right)
            self._tried = self._tried * DECAY + 1.0

    @property
    def value(self) -> float:
        return self._right / self._tried


class DraftLength:
    """Lengths that maximise expected tokens per time.

    A draft of L tokens, each right with probability a once those before it are, gives (1 - a^(L+1)) / (1 - a) tokens
    (Leviathan et al. 2023, eq. 1). Each sequence has its own moving estimate of a; times come from ``StepCost``, for
    the present number of sequences. Where drafting would not pay, or of late did not, there is none, but for probes of
    ``PROBE`` drafts of one sequence, another every time, after 1, 2, 4, … ``MAX_PAUSE`` such steps, soon again once a
    probe was all right; where it always does, a step in ``PLAIN_PERIOD`` goes without, to be measured. Deterministic
    given what it is told.

    Args:
        most: drafts of a sequence at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rates: dict[Sequence, _Rate] = {}
        self._all = _Rate(FIRST_RATE)
        self._costs: dict[int, StepCost] = {}
        self._pause = self._num_skipped = self._num_drafted = 0
        self._num_probes = 0
        self._is_probe = False

    def room(self, sequence: Sequence) -> int:
        """Return the longest useful draft of a sequence: the step gives a token more than drafts that are right."""
        return min(self._most, sequence.max_length - sequence.length - 1)

    def choose(self, num_sequences: int, available: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Return how much to draft for sequences of the next step, without those that get nothing.

        Args:
            num_sequences: sequences that decode in the step.
            available: longest draft of each one that may have drafts.
        """
        self._is_probe = False
        if not available:
            return {}
        cost = self._cost(num_sequences)
        if not cost.is_known or self._num_drafted >= PLAIN_PERIOD:
            self._num_drafted = 0
            return {}
        has_paid = not cost.speed or cost.speed > GAIN * num_sequences / cost.plain
        lengths = self._best(num_sequences, available, cost) if has_paid else {}
        if lengths:
            self._num_drafted += 1
            self._num_skipped = self._pause = 0
        elif self._num_skipped >= self._pause:
            self._num_skipped = 0
            self._is_probe = True
            self._num_probes += 1
            sequence = list(available)[self._num_probes % len(available)]
            return {sequence: min(PROBE, available[sequence])}
        else:
            self._num_skipped += 1
        return lengths

    def rest(self, num_steps: int) -> None:
        """Nothing will be asked before this many steps; they count as steps without drafts."""
        self._num_skipped += num_steps

    def observe(
        self, num_sequences: int, results: Mapping[Sequence, tuple[int, int]], was_plain: bool, seconds: float | None
    ) -> None:
        """Learn from a step.

        Args:
            num_sequences: sequences of the step.
            results: drafts that were verified, and how many of them were right, of each sequence that had any.
            was_plain: nothing was drafted.
            seconds: time of the step and its drafts; None where it says nothing, because prompts were in it.
        """
        num_drafts, num_tokens = 0, num_sequences
        for sequence, (count, num_right) in results.items():
            num_drafts += count
            num_tokens += num_right
            rate = self._rates.get(sequence)
            if rate is None:
                rate = self._rates[sequence] = _Rate(self._all.value)
            rate.add(num_right, count)
            self._all.add(num_right, count)
        if self._is_probe and results:
            was_right = all(count == num_right for count, num_right in results.values())
            self._pause = 0 if was_right else min(max(2 * self._pause, 1), MAX_PAUSE)
        if seconds is not None:
            cost = self._cost(num_sequences)
            if was_plain:
                cost.add_plain(seconds)
            else:
                cost.add_drafted(num_drafts, num_tokens, seconds)

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a sequence; idempotent."""
        self._rates.pop(sequence, None)

    def _cost(self, num_sequences: int) -> StepCost:
        return self._costs.setdefault(num_sequences.bit_length(), StepCost())

    def _best(self, num_sequences: int, available: Mapping[Sequence, int], cost: StepCost) -> dict[Sequence, int]:
        """Maximise tokens / time by Dinkelbach's method: at the rate so far, a draft is worth it if it is more likely
        to become a token than tokens would come in its time; repeat with the new rate."""
        prior = self._all.value
        rates = [(s, min(self._rates[s].value if s in self._rates else prior, 0.999), available[s]) for s in available]
        plain = num_sequences / cost.plain
        speed, lengths = plain, dict[Sequence, int]()
        for _ in range(4):
            least, tokens, total = cost.per_draft * speed, float(num_sequences), 0
            lengths = {}
            for sequence, rate, most in rates:
                length, chance = 0, rate
                while length < most and chance > least:
                    tokens += chance
                    length += 1
                    chance *= rate
                if length:
                    lengths[sequence] = length
                    total += length
            if not total:
                return {}
            speed = tokens / (cost.drafted + cost.per_draft * total)
        return lengths if speed > GAIN * plain else {}
