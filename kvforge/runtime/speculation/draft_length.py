"""How many tokens to draft for each sequence of the next step: what gives most tokens in its time."""

from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from operator import mul
from types import MappingProxyType

from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.speculation.balance import Balance
from kvforge.runtime.speculation.prompt_credit import PromptCredit
from kvforge.runtime.speculation.step_cost import MAX_RATIO, StepCost

DECAY = 0.8
"""What a sequence's verified drafts still count after each later one."""
FIRST_RATE = 0.6
GAIN = 1.02
"""Drafting must be expected to be this much better than plain decoding."""
PROBE = 4
GROWTH = 4
"""A step has at most so many times the drafts that one of as many sequences had: what many cost is not known from few,
and where a step's first draft is dear and the others are not, many pay and few do not."""
PLAIN_PERIOD, NUM_PLAIN = 96, 3
"""After so many steps so many go without drafting, to be measured."""


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
    (Leviathan et al. 2023, eq. 1). Each sequence has its own moving estimate of a, in whose place come the chances that
    a draft has of its own (``Draft.chances``); times come from ``StepCost``, for the present number of sequences.
    Whether to draft at all is decided by what came of it (``Balance``, one for each number of sequences), with all that
    trying costs; whether prompts have entries of a draft head, by ``PromptCredit``. Where no length is expected to pay,
    ``PROBE`` drafts of one sequence are tried, another every time, or of drafts with chances those that are more likely
    right than wrong, as far as ``StepCost.trial`` allows. Deterministic given what it is told.

    Args:
        maximum: drafts of a sequence at most.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._rates: dict[Sequence, _Rate] = {}
        self._all = _Rate(FIRST_RATE)
        self._costs: dict[int, tuple[StepCost, Balance]] = {}
        self._prompts = PromptCredit()
        self._num_steps = self._num_probes = 0

    def room(self, sequence: Sequence) -> int:
        """Return the longest useful draft of a sequence: the step gives a token more than drafts that are right."""
        return min(self._maximum, sequence.max_length - sequence.length - 1)

    def is_due(self, num_sequences: int) -> bool:
        """Return whether to look for drafts in the next step, in which so many sequences decode; asked once a step."""
        cost, balance = self._cost(num_sequences)
        self._num_steps = (self._num_steps + 1) % (PLAIN_PERIOD + NUM_PLAIN)
        return cost.is_known and balance.is_open and self._num_steps < PLAIN_PERIOD

    def num_rests(self, num_sequences: int) -> int:
        """Return how many steps behind the next one need neither be asked for nor observed, where nothing is due."""
        cost, balance = self._cost(num_sequences)
        return max(balance.num_closed - 1, 0) if cost.is_known else 0

    def choose(
        self,
        num_sequences: int,
        available: Mapping[Sequence, int],
        chances: Mapping[Sequence, SequenceOf[float]] = MappingProxyType({}),
    ) -> dict[Sequence, int]:
        """Return how much to draft for sequences of the next step, without those that get nothing.

        Args:
            num_sequences: sequences that decode in the step, for which ``is_due``.
            available: longest draft of each one that may have drafts.
            chances: of each token of a draft that is there, as ``Draft.chances``.
        """
        if not available:
            return {}
        cost = self._cost(num_sequences)[0]
        lengths = self._best(num_sequences, available, chances, cost)
        if not lengths:
            self._num_probes += 1
            if chances:
                lengths = _within(_likely(chances), max(PROBE, cost.trial))
            else:
                sequence = list(available)[self._num_probes % len(available)]
                lengths = {sequence: min(PROBE, available[sequence])}
        return _within(lengths, max(PROBE, GROWTH * cost.most_drafts))

    @property
    def pays_for_prompts(self) -> bool:
        """Whether a draft head's entries of the next prompts are paid for."""
        return self._prompts.is_open

    def add_beside_prompts(self, num_sequences: int, num_drafts: int, num_right: int, seconds: float) -> None:
        """Drafts were looked for so long before a step whose own time says nothing, because prompts were in it: for
        ``num_sequences``, which had ``num_drafts``. What verifying them took is taken from other steps."""
        cost, balance = self._cost(num_sequences)
        if cost.is_known:
            took = min(max(seconds, cost.per_draft * num_drafts) / cost.plain, MAX_RATIO)
            beyond = balance.add_drafting(num_right / num_sequences - GAIN * took)
            self._prompts.gain(beyond * cost.plain)

    def add_prompts(self, seconds: float) -> None:
        """Entries of prompts took so long in a step whose own time says nothing."""
        self._prompts.spend(seconds)

    def observe(
        self,
        num_sequences: int,
        results: Mapping[Sequence, tuple[int, int]],
        was_tried: bool,
        seconds: float | None,
        num_rests: int = 0,
        looking: float = 0.0,
    ) -> None:
        """Learn from a step.

        Args:
            num_sequences: sequences of the step.
            results: drafts that were verified, and how many of them were right, of each sequence that had any.
            was_tried: drafts were looked for, whether there were any or not.
            seconds: time of the step and its drafts; None where it says nothing, because prompts were in it.
            num_rests: steps before it without drafts, which were not observed.
            looking: of the seconds, what went into looking for drafts.
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
        if seconds is None:
            return
        cost, balance = self._cost(num_sequences)
        if results:
            seconds = cost.add_drafted(num_drafts, seconds, looking)
        if was_tried and cost.is_known:
            took = seconds / cost.plain if results else min(seconds / cost.plain, MAX_RATIO)
            beyond = balance.add_drafting(num_tokens / num_sequences - GAIN * took)
            self._prompts.gain(beyond * cost.plain)
        elif not results:
            if not cost.is_known and (other := self._nearest(num_sequences)) is not None:
                balance.follow(other)
            cost.add_plain(seconds)
            balance.add_plain(1 + num_rests)
            self._prompts.add_plain((1 + num_rests) * seconds)

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a sequence; idempotent."""
        self._rates.pop(sequence, None)

    def _nearest(self, num_sequences: int) -> Balance | None:
        """Of the number of sequences nearest to this one at which drafting could be tried."""
        known = [number for number, (cost, _) in self._costs.items() if cost.is_known]
        return self._costs[min(known, key=lambda number: abs(number - num_sequences))][1] if known else None

    def _cost(self, num_sequences: int) -> tuple[StepCost, Balance]:
        """Of this number of sequences; of 8 and more, numbers with equal first three bits share one."""
        shift = max(num_sequences.bit_length() - 3, 0)
        key = num_sequences >> shift << shift
        if key not in self._costs:
            self._costs[key] = StepCost(), Balance()
        return self._costs[key]

    def _best(
        self,
        num_sequences: int,
        available: Mapping[Sequence, int],
        chances: Mapping[Sequence, SequenceOf[float]],
        cost: StepCost,
    ) -> dict[Sequence, int]:
        """Maximise tokens / time by Dinkelbach's method: at the rate so far, a draft is worth it if it is more likely
        to become a token than tokens would come in its time; repeat with the new rate."""
        prior = self._all.value
        guesses = []
        for sequence, maximum in available.items():
            own = chances.get(sequence)
            if own is None:
                rate = self._rates[sequence].value if sequence in self._rates else prior
                own = [min(rate, 0.999)] * maximum
            falling = list(accumulate(own, mul))
            guesses.append((sequence, [-chance for chance in falling], list(accumulate(falling))))
        plain = num_sequences / cost.plain
        speed, lengths = plain, dict[Sequence, int]()
        for _ in range(4):
            minimum, tokens, total = cost.per_draft * speed, float(num_sequences), 0
            lengths = {}
            for sequence, falling, expected in guesses:
                length = bisect_left(falling, -minimum)  # those above it
                if length:
                    tokens += expected[length - 1]
                    lengths[sequence] = length
                    total += length
            if not total:
                return {}
            speed = tokens / (cost.drafted + cost.per_draft * total)
        return lengths if speed > GAIN * plain else {}


def _within(lengths: dict[Sequence, int], most: int) -> dict[Sequence, int]:
    """Return the lengths, if they are more than ``most`` in all, of the longest drafts so far as it goes."""
    if sum(lengths.values()) <= most:
        return lengths
    kept = dict[Sequence, int]()
    for sequence in sorted(lengths, key=lengths.__getitem__, reverse=True):
        if most <= 0:
            break
        kept[sequence] = min(lengths[sequence], most)
        most -= kept[sequence]
    return kept


def _likely(chances: Mapping[Sequence, SequenceOf[float]]) -> dict[Sequence, int]:
    """Return how many tokens of each draft are more likely right than wrong, without those that have none."""
    lengths = {s: sum(chance > 0.5 for chance in accumulate(own, mul)) for s, own in chances.items()}
    return {sequence: length for sequence, length in lengths.items() if length}
