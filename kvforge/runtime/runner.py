"""Runs one planned step: ``lower`` on every token, ``upper`` on the survivors only."""

from typing import cast

import torch

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.schedule import Schedule
from kvforge.runtime.session import Session, StepFunctions
from kvforge.runtime.slot_table import SlotTable
from kvforge.runtime.step_batch import StepBatch, StepBatchBuilder


class Runner:
    """Owns the K,V pools and the step buffers."""

    def __init__(self, session: StepFunctions, config: RuntimeConfig) -> None:
        self._session = session
        self._builder = StepBatchBuilder(config)
        self.pools = session.allocate_pools(config.num_pages)
        self.num_lower_calls = 0
        self.num_upper_calls = 0
        self._hidden = torch.empty(0)

    def warm_up(self, seq_len: int, max_num_seqs: int) -> None:
        """Do now what the session would otherwise do in the first steps of up to ``max_num_seqs`` sequences of up to
        ``seq_len`` tokens; nothing for sessions without such work."""
        warm_up = getattr(self._session, "warm_up", None)
        if warm_up is not None:
            warm_up(self.pools, seq_len, max_num_seqs)

    def run(self, plan: Schedule, slots: SlotTable) -> torch.Tensor | None:
        """Compute the planned tokens; returns logits [R, vocab] of ``plan.survivors``, None if R is 0."""
        return self.run_batch(self._builder.build(plan, slots))

    @torch.inference_mode()
    def run_batch(self, batch: StepBatch) -> torch.Tensor | None:
        """Compute a step; returns logits [R, vocab] of its survivors, None if R is 0."""
        self.num_lower_calls += 1
        hidden = self._session.lower(
            batch.input_ids,
            batch.positions,
            batch.slot_mapping,
            batch.query_start,
            batch.kv_length,
            batch.page_table,
            self.pools,
        )
        if batch.num_survivors == 0:
            return None
        self.num_upper_calls += 1
        self._hidden = hidden
        return self._session.upper(
            hidden,
            batch.survivor_index,
            batch.survivor_start,
            batch.positions,
            batch.kv_length,
            batch.page_table,
            self.pools,
        )

    @torch.inference_mode()
    def early_exit(self, batch: StepBatch) -> torch.Tensor:
        """Return the logits [R, vocab] of the head at the cut for the survivors of ``batch``, the last step run.

        Raises:
            EngineError: the engine has no early exit.
        """
        return cast(Session, self._session).early_exit(self._hidden, batch.survivor_index)
