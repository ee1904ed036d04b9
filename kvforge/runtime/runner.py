"""Runs one planned step: ``lower`` on every token, ``upper`` on the survivors only."""

from typing import Protocol

import torch

from kvforge.engine import Manifest
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.scheduler import Schedule
from kvforge.runtime.slot_table import SlotTable
from kvforge.runtime.step_batch import StepBatchBuilder

Pools = list[tuple[torch.Tensor, torch.Tensor]]


class StepFunctions(Protocol):
    """What a session offers: the two graphs of one engine, and memory for their K,V pools.

    Pools are one (k_pool, v_pool) per owner layer in ascending order, each
    [num_pages, page_size, num_kv_heads, head_dim] in the manifest's ``kv_dtype``.
    """

    manifest: Manifest

    def allocate_pools(self, num_pages: int) -> Pools:
        """Return uninitialised pools."""

    def lower(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_start: torch.Tensor,
        kv_length: torch.Tensor,
        page_table: torch.Tensor,
        pools: Pools,
    ) -> torch.Tensor:
        """Layers below the cut and all K,V writes for T tokens; returns hidden [T, hidden_size]."""

    def upper(
        self,
        hidden: torch.Tensor,
        survivor_index: torch.Tensor,
        survivor_start: torch.Tensor,
        positions: torch.Tensor,
        kv_length: torch.Tensor,
        page_table: torch.Tensor,
        pools: Pools,
    ) -> torch.Tensor:
        """Layers above the cut for R survivors; returns logits [R, vocab_size] float32."""


class Runner:
    """Owns the K,V pools and the step buffers."""

    def __init__(self, session: StepFunctions, config: RuntimeConfig) -> None:
        self._session = session
        self._builder = StepBatchBuilder(config)
        self.pools = session.allocate_pools(config.num_pages)
        self.num_lower_calls = 0
        self.num_upper_calls = 0

    @torch.inference_mode()
    def run(self, plan: Schedule, slots: SlotTable) -> torch.Tensor | None:
        """Compute the planned tokens; returns logits [R, vocab] of ``plan.survivors``, None if R is 0."""
        batch = self._builder.build(plan, slots)
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
        return self._session.upper(
            hidden,
            batch.survivor_index,
            batch.survivor_start,
            batch.positions,
            batch.kv_length,
            batch.page_table,
            self.pools,
        )
