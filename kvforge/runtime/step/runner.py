"""Runs one planned step: ``lower`` on every token, ``upper`` on the survivors only."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import cast

import torch

from kvforge.kv_policies.state import EngineMemory, MeasuringState
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.slot_table import SlotTable
from kvforge.runtime.sessions.inputs import UpperStep
from kvforge.runtime.sessions.session import Session
from kvforge.runtime.step.batch import StepBatch, StepBatchBuilder
from kvforge.runtime.step.early_exit import EarlyExits
from kvforge.runtime.step.flight import Flight
from kvforge.runtime.step.head_draft import HeadDraft
from kvforge.runtime.step.prediction import PromptPredictor
from kvforge.runtime.step.probe import probe_steps
from kvforge.runtime.step.prompt_rows import score_prompts
from kvforge.runtime.step.self_draft import SelfDraft
from kvforge.runtime.step.work import Kind, Work, WorkListener, token_units, units_of, variant_of


class Runner:
    """Owns the K,V pools and the step buffers.

    Args:
        early_exit_threshold: generated tokens whose early exit is more probable than this skip ``upper``; None: none.
        early_exit_prompts: so do the last tokens of prompts.
        drafts_by_head: drafts are the engine's draft head's, not the early exit's.
        is_asynchronous: ``run`` waits for nothing, and its logits are on the device.
    """

    def __init__(
        self,
        session: Session,
        config: RuntimeConfig,
        early_exit_threshold: float | None = None,
        early_exit_prompts: bool = False,
        drafts_by_head: bool = False,
        is_asynchronous: bool = False,
    ) -> None:
        self._session, self._config = session, config
        self._is_asynchronous = is_asynchronous
        self.self_draft = SelfDraft(session, config)
        self.head_draft = HeadDraft(session, config) if drafts_by_head else None
        self._exits = None
        if early_exit_threshold is not None:
            self._exits = EarlyExits(session, early_exit_threshold, early_exit_prompts)
        self._builder = StepBatchBuilder(config)
        probing = config.kv_policy.probing
        scratch = 0 if probing is None else probing.num_scratch_pages(config.page_size)
        above: tuple[int, ...] = () if config.visibility is None else (config.num_upper_pages,)
        if config.num_state_rows:
            above = 0, config.num_state_rows + config.num_snapshots
        self.pools = session.allocate_pools(
            config.num_pages + scratch, config.num_state_pages + scratch, config.max_num_seqs, *above
        )
        manifest = session.manifest
        memory = EngineMemory(
            self.pools,
            manifest.kv_scales or ((1.0, 1.0),) * manifest.model.num_owners,
            lambda: session.rope_tables,
            config.max_seq_len,
            manifest.special_tokens,
            manifest.punctuation_tokens,
        )
        self._state = config.kv_policy.keeping.make_state(memory)
        exact = config.exact_tokens
        self._prediction = None
        if exact is not None:
            self._prediction = PromptPredictor(session, config.num_pages, config.page_size, bool(exact.share))
        self.num_lower_calls = 0
        self.num_upper_calls = 0
        self._hidden = torch.empty(0)
        self._listener: WorkListener | None = None
        self._kind: Kind | None = None

    def watch(self, listener: WorkListener, kind: Kind | None = None) -> None:
        """Tell ``listener`` of each piece of work before it begins; ``kind`` replaces what a step's tokens are."""
        self._listener, self._kind = listener, kind

    def warm_up(self, seq_len: int, max_num_seqs: int) -> None:
        """Do now what the session would otherwise do in the first steps of up to ``max_num_seqs`` sequences of up to
        ``seq_len`` tokens; nothing for sessions without such work."""
        self._session.warm_up(self.pools, seq_len, max_num_seqs)

    @property
    def num_early_exits(self) -> int:
        """Rows whose logits were the early exit's."""
        return 0 if self._exits is None else self._exits.num_exits

    @property
    def num_prompt_early_exits(self) -> int:
        """Those of them that were of a prompt's last token."""
        return 0 if self._exits is None else self._exits.num_prompt_exits

    @property
    def policy_counters(self) -> dict[str, int]:
        """What the KV policy has counted: see ``Keeping.counters``."""
        return self._state.counters()

    def measure(self, sequence: Sequence) -> SequenceOf[int]:
        """See ``MeasuringState``; only where the KV policy has ``keeps_by_content``."""
        return cast(MeasuringState, self._state).measure(sequence)

    def change(self, plan: Schedule) -> None:
        """Do ``plan.transitions`` and ``plan.probes``. On as many threads every time, as the last bits depend on
        them."""
        if plan.transitions:
            if self._listener is not None:
                self._listener(Work("transition", sum(sequence.num_prompt_tokens for sequence in plan.transitions)))
            self._state.apply(list(plan.transitions.values()))
        for sequence, index in plan.probes.items():
            self._probe(sequence, index)

    @torch.inference_mode()
    def _probe(self, sequence: Sequence, index: int) -> None:
        """Compute a probe of a sequence's cache, in pieces that depend on the engine alone."""
        manifest = self._session.manifest
        for step in probe_steps(sequence, index, manifest, self._config):
            if self._listener is not None:
                num_tokens = step.input_ids.shape[0]
                units = units_of(num_tokens, num_tokens * int(step.kv_length), manifest)
                self._listener(Work("prefill", units))
            hidden = self._session.lower(step, self.pools)
            if manifest.model.has_cut:
                rows = torch.arange(step.input_ids.shape[0], dtype=torch.int32)
                rest = step.positions, step.kv_length, step.page_table, step.state
                self._session.upper(UpperStep(hidden, rows, step.query_start, *rest), self.pools)

    @torch.inference_mode()
    def run(self, plan: Schedule, slots: SlotTable, flight: Flight | None = None) -> torch.Tensor | None:
        """Compute the planned tokens, and drafts of them where ``plan.draft_limits`` has room, which then are in
        ``plan.drafts``; returns logits [R, vocab] of ``plan.survivors`` and their drafts, None if R is 0.
        ``plan.transitions`` must be done. ``flight`` chooses tokens that the step begins with."""
        if plan.num_tokens == 0:
            return None
        if self._listener is not None:
            kind: Kind = self._kind or ("prefill" if plan.prefills or plan.predictions else "decode")
            variant = variant_of(plan) if self._session.captures_steps else ()
            self._listener(Work(kind, token_units(plan, self._session.manifest), variant))
        if plan.predictions and self._prediction is not None:
            self._prediction.run(plan, slots, self.pools)
            if not plan.sequences:
                return None
        head = self.head_draft
        if head is not None and plan.draft_limits:
            head.draft(plan, slots)
        batch = self._builder.build(plan, slots)
        if flight is not None and plan.decodes:
            step = batch.lower._replace(chosen=(flight.tokens.ids, flight.rows_of(plan)))
            batch = replace(batch, lower=step)
        hidden = self._lower(batch)
        hidden = score_prompts(hidden, plan, batch, self._config.max_num_survivors, self._upper_of_prompt)
        if head is not None:
            return self._noted(head, hidden, plan, batch, slots)
        if batch.num_survivors == 0 or not (plan.draft_limits or self._exits):
            return self._survivors_logits(hidden, batch)
        if self._exits is not None:
            return self._exits.logits(hidden, plan, batch, self._upper)
        return self._upper(self.self_draft.run(hidden, plan, batch, slots, self.pools))

    @torch.inference_mode()
    def run_batch(self, batch: StepBatch) -> torch.Tensor | None:
        """Compute a step; returns logits [R, vocab] of its survivors that logits are asked for, None if R is 0."""
        self._hidden = self._lower(batch)
        logits = self._survivors_logits(self._hidden, batch)
        return self._session.host_logits(logits) if logits is not None and self._is_asynchronous else logits

    def _survivors_logits(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor | None:
        if not batch.num_survivors:
            return None
        logits = self._upper(batch.upper(hidden))
        if batch.past_cut is not None and not batch.past_cut.num_asked:
            return None
        if batch.logit_rows is None:
            return logits
        return logits[batch.logit_rows] if len(batch.logit_rows) else None

    def _noted(
        self, head: HeadDraft, hidden: torch.Tensor, plan: Schedule, batch: StepBatch, slots: SlotTable
    ) -> torch.Tensor | None:
        """Return the logits of the survivors, once the draft head has noted what it reads of the step."""
        if not head.reads_above:
            head.note(plan, batch, hidden[:, -head.width :], slots)
            return self._survivors_logits(hidden, batch)
        if not batch.num_survivors:
            head.note(plan, batch, hidden[:0, : head.width], slots)
            return None
        self.num_upper_calls += 1
        logits, states = self._session.upper_and_states(batch.upper(hidden), self.pools)
        head.note(plan, batch, states, slots)
        return logits

    def _lower(self, batch: StepBatch) -> torch.Tensor:
        self.num_lower_calls += 1
        return self._session.lower(batch.lower, self.pools)

    def _upper_of_prompt(self, step: UpperStep) -> torch.Tensor:
        """As ``_upper``, for rows of one sequence that are besides what the step's plan says."""
        if self._listener is not None:
            num_rows = len(step.positions)
            units = units_of(num_rows, num_rows * int(step.kv_length), self._session.manifest)
            self._listener(Work("prefill", units))
        self.num_upper_calls += 1
        return self._session.upper(step, self.pools)

    def _upper(self, step: UpperStep) -> torch.Tensor:
        self.num_upper_calls += 1
        upper = self._session.device_logits if self._is_asynchronous else self._session.upper
        return upper(step, self.pools)

    @torch.inference_mode()
    def early_exit(self, batch: StepBatch) -> torch.Tensor:
        """Return the logits [R, vocab] of the head at the cut for the survivors of ``batch``, the last step run.

        Raises:
            EngineError: the engine has no early exit.
        """
        return self._session.early_exit(self._hidden, batch.survivor_index)
