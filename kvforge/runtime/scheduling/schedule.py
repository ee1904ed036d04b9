"""One step's work, as the scheduler plans it."""

from dataclasses import dataclass, field
from itertools import accumulate

from kvforge.kv_policies.transition import Transition
from kvforge.runtime.requests.sequence import Sequence


@dataclass
class Schedule:
    """One step's work: sequences with one token to compute, then chunks of sequences with several.

    ``budget`` is what is left of the step's tokens. A chunk that does not reach its sequence's end has no
    survivor; one that does may go on with ``drafts``, which are survivors too. ``draft_limits`` are drafts that the
    step may make itself: what they need is reserved, and the runner moves those that it makes to ``drafts``.
    ``transitions`` are done before anything else, in their order, then ``probes``: of these sequences, which wait for
    their first transition, the probe with this number. ``predictions`` are prompts of which an auxiliary model runs
    over the next tokens, before the model itself computes anything; where it then has the whole prompt, the runner may
    note the ``importance`` of each of its tokens. ``state_writes`` are rows for the states behind some of a chunk's
    tokens and drafts, by their place in it. While sequences are admitted, ``num_reserved`` pages are kept for those
    that run. Unless the step ``notes_decodes``, a draft head notes prompts alone; unless it ``notes_prompts``, none
    that begins. ``note_seconds`` is how long entries took it behind the step.
    """

    budget: int
    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    drafts: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)
    draft_limits: dict[Sequence, int] = field(default_factory=dict)
    transitions: dict[Sequence, Transition] = field(default_factory=dict)
    probes: dict[Sequence, int] = field(default_factory=dict)
    predictions: list[tuple[Sequence, int]] = field(default_factory=list)
    importance: dict[Sequence, list[float]] = field(default_factory=dict)
    state_writes: dict[Sequence, dict[int, int]] = field(default_factory=dict)
    num_preempted: int = 0
    num_reserved: int = 0
    notes_decodes: bool = True
    notes_prompts: bool = True
    note_seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills or self.probes or self.predictions)

    @property
    def num_tokens(self) -> int:
        """Packed tokens of the step, those that are predicted included."""
        chunks = (*self.prefills, *self.predictions)
        return len(self.decodes) + sum(count for _, count in chunks) + self.num_drafts

    @property
    def num_drafts(self) -> int:
        """Drafts of all sequences."""
        return sum(map(len, self.drafts.values()))

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the step, in the step's order."""
        return self.decodes + [sequence for sequence, _ in self.prefills]

    @property
    def affected(self) -> list[Sequence]:
        """All sequences of the step, and those whose cache it only changes, probes or predicts: if it fails, their K,V
        have no owner."""
        predicted = (sequence for sequence, _ in self.predictions)
        return list(dict.fromkeys([*self.sequences, *self.transitions, *self.probes, *predicted]))

    @property
    def survivors(self) -> list[Sequence]:
        """Sequences whose last token is computed, in the step's order; they get a new token."""
        return self.decodes + [s for s, n in self.prefills if s.num_computed + n == s.length]

    @property
    def survivor_rows(self) -> list[int]:
        """The row of the step's logits that each of ``survivors`` begins at; its drafts have the rows after it."""
        counts = [1 + len(self.drafts.get(sequence, ())) for sequence in self.survivors]
        return [0, *accumulate(counts)][:-1]

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out and give its tokens back to the budget."""
        self.budget += self.draft_limits.pop(sequence, len(self.drafts.pop(sequence, ())))
        self.transitions.pop(sequence, None)
        self.probes.pop(sequence, None)
        if sequence in self.decodes:
            self.decodes.remove(sequence)
            self.budget += 1
        for chunks in (self.prefills, self.predictions):
            for entry in [entry for entry in chunks if entry[0] is sequence]:
                chunks.remove(entry)
                self.budget += entry[1]
