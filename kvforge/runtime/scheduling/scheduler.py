"""Which tokens of which sequences the next step computes, and in which pages: numbers, never tensors."""

import numpy as np

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence, Status
from kvforge.runtime.scheduling.admissions import Admissions
from kvforge.runtime.scheduling.drafts import Drafts
from kvforge.runtime.scheduling.fetches import PageSource
from kvforge.runtime.scheduling.holdings import Holdings
from kvforge.runtime.scheduling.predictions import Predictions
from kvforge.runtime.scheduling.probes import Probes
from kvforge.runtime.scheduling.running import RunningWork
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.transitions import Transitions


class Scheduler(Holdings):
    """Continuous batching with chunked prefill over a paged K,V pool, within ``max_num_tokens`` a step.

    A step is planned in stages, each in a file of its own: changes of caches, running sequences, admissions, drafts,
    then where states of layers go.
    """

    def __init__(self, config: RuntimeConfig, source: PageSource | None = None) -> None:
        super().__init__(config, source)
        probing, exact_tokens = config.kv_policy.probing, config.exact_tokens
        self._probes = None if probing is None else Probes(probing)
        self._predictions = None if exact_tokens is None else Predictions(self, exact_tokens)
        self.give_back += [stage.give_back for stage in (self._probes, self._predictions) if stage is not None]
        self.transitions = Transitions(self, self._probes)
        work = RunningWork(self, self._predictions)
        self.admissions = Admissions(self, work)
        self.drafts = Drafts(self)
        self.propose = self.drafts.propose
        stages = self.transitions, work, self.admissions, self.drafts
        self._stages = [stage.plan for stage in stages[0 if self.transitions.is_used else 1 :]]
        if self.state_rows.is_used:
            self._stages.append(self.state_rows.plan)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.transitions.add(sequence)
        if self.upper_pages.is_used:
            sequence.max_reusable = sequence.num_prompt_tokens - 1
        if self._predictions is not None:
            self._predictions.add(sequence)
        self.wait(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out in any state and let go of its pages and slot; idempotent."""
        if sequence.status is Status.RUNNING:
            self.remove(self.running, sequence)
            self.release(sequence)
        elif sequence.status is Status.WAITING:
            self.remove(self.waiting, sequence)
            self.fetches.drop(sequence)
        sequence.status = Status.FINISHED
        self.drafts.proposals.pop(sequence, None)

    def schedule(self) -> Schedule:
        """Plan one step; the plan is empty only if nothing can run before a sequence is added or finished."""
        plan = Schedule(self.config.max_num_tokens)
        self.fetches.advance()
        for plan_stage in self._stages:
            plan_stage(plan)
        return plan

    def commit(self, plan: Schedule) -> None:
        """Record that a step has written all planned K,V; publish the pages that are now full."""
        if self._probes is not None:
            self._probes.commit(plan)
        slots, page_size = self.slots, self.config.page_size
        publish = self.config.enable_prefix_cache
        if plan.decodes:
            slots.num_computed[[s.slot for s in plan.decodes]] += 1
        for sequence in plan.decodes:
            num_computed = sequence.num_computed = sequence.num_computed + 1
            sequence.prompt_done = True
            if publish and num_computed % page_size == 0 and sequence.cache_offset == 0:
                self.prefix_cache.publish(sequence)
        if self._predictions is not None:
            self._predictions.commit(plan)
        for sequence, num_tokens in plan.prefills:
            sequence.compute(num_tokens)
            slots.num_computed[sequence.slot] = sequence.num_computed
            if publish and sequence.cache_offset == 0:
                self.prefix_cache.publish(sequence)
        if self.exact_pages.is_used:
            self.exact_pages.commit(plan)
        self.state_rows.commit(plan.sequences)

    def accept(self, sequences: list[Sequence]) -> None:
        """Record that the newest token of each sequence was a draft, so that the step has written its K,V already."""
        for sequence in sequences:
            sequence.num_computed += 1
            self.slots.num_computed[sequence.slot] = sequence.num_computed
            if self.config.enable_prefix_cache and sequence.num_computed % self.config.page_size == 0:
                self.prefix_cache.publish(sequence)
        self.state_rows.accept(sequences)

    def roll_back(self, sequence: Sequence) -> None:
        """Let go of a running sequence's pages beyond its computed tokens: drafts that were not accepted."""
        keep = self.pages_for(sequence.num_computed + sequence.cache_offset)
        self.let_go(sequence.pages[keep:])
        del sequence.pages[keep:]
        self.exact_pages.trim(sequence)
        self.upper_pages.trim(sequence)
        self.state_rows.trim(sequence)

    def expect(self, sequences: list[Sequence]) -> None:
        """Have the next step planned before it is known what the last one chose for these running sequences: each goes
        on by a token without a meaning, but for those that this is the last one of."""
        self.awaited = {sequence: sequence.length for sequence in sequences}
        for sequence in sequences:
            if sequence.length + 1 < sequence.max_length:
                sequence.append(0)

    def withdraw(self) -> None:
        """Take back what ``expect`` has added."""
        for sequence, length in self.awaited.items():
            sequence.length = length
        self.awaited = {}

    def append(self, sequences: list[Sequence], tokens: list[int]) -> None:
        """Add the new token of each sequence. One may have been preempted while a step in flight chose it."""
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.append(token)
        self.slots.next_token[[s.slot for s in sequences]] = np.asarray(tokens, dtype=np.int32)
