"""What a step's upper graph takes above a blind cut: the tokens that go past it, and where their K and V are there."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from kvforge.kv_policies.visibility import Visibility
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.slot_table import SlotTable


@dataclass(frozen=True)
class PastCut:
    """Of S sequences, R packed tokens; int32."""

    survivor_index: torch.Tensor
    """[R] rows of the step's packed tokens"""
    survivor_start: torch.Tensor
    """[S+1]"""
    kv_length: torch.Tensor
    """[S] tokens in each sequence's upper pages after this step"""
    page_table: torch.Tensor
    """[S, M]"""
    slots: torch.Tensor
    """[R] page * page_size + offset where their K and V go"""
    logit_index: torch.Tensor
    """[L] survivors whose logits are asked for; one that nobody asks for where that is none"""
    num_asked: int
    """Logits asked for."""


@dataclass(frozen=True)
class ComputedChunk:
    """Tokens from ``start`` to ``end`` of a sequence with ``num_prompt_tokens`` of prompt, whose upper pages are
    ``pages``; logits are asked for of the last ``num_asked``."""

    num_prompt_tokens: int
    start: int
    end: int
    pages: SequenceOf[int] | np.ndarray
    num_asked: int


def past_cut(chunks: SequenceOf[ComputedChunk], visibility: Visibility, page_size: int) -> PastCut:
    """Return what of a step with these chunks goes past the cut."""
    index: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    lengths, starts, first = [], [0], 0
    for chunk in chunks:
        anchors, behind = visibility.seen(chunk.num_prompt_tokens, chunk.start, chunk.end)
        positions = np.concatenate((np.asarray(anchors, dtype=np.int32), np.asarray(behind, dtype=np.int32)))
        length = visibility.num_seen(chunk.num_prompt_tokens, chunk.end)
        cached = np.arange(length - len(positions), length, dtype=np.int32)
        index.append(positions - chunk.start + first)
        slots.append(np.asarray(chunk.pages, dtype=np.int32)[cached // page_size] * page_size + cached % page_size)
        starts.append(starts[-1] + len(positions))
        rows.append(np.arange(starts[-1] - chunk.num_asked, starts[-1]))
        lengths.append(length)
        first += chunk.end - chunk.start
    table = np.zeros((len(chunks), max(-(-max(lengths) // page_size), 1)), dtype=np.int32)
    for row, chunk in enumerate(chunks):
        pages = chunk.pages[: table.shape[1]]
        table[row, : len(pages)] = pages
    asked = np.concatenate(rows)
    return PastCut(
        torch.from_numpy(np.concatenate(index).astype(np.int32)),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.from_numpy(table),
        torch.from_numpy(np.concatenate(slots).astype(np.int32)),
        torch.from_numpy(asked.astype(np.int32) if len(asked) else np.zeros(1, dtype=np.int32)),
        len(asked),
    )


def planned_past_cut(plan: Schedule, slots: SlotTable, visibility: Visibility, page_size: int) -> PastCut:
    """Return what of a planned step goes past the cut; decode rows are filled without per-row Python work."""
    if plan.prefills:
        return past_cut([*_decodes(plan), *_prefills(plan)], visibility, page_size)
    rows = np.fromiter((s.slot for s in plan.decodes), dtype=np.intp, count=len(plan.decodes))
    cached = slots.num_computed[rows] - slots.num_hidden[rows]
    everyone = np.arange(len(rows) + 1, dtype=np.int32)
    pages = slots.upper_table[rows, cached // page_size]
    return PastCut(
        torch.from_numpy(everyone[:-1]),
        torch.from_numpy(everyone),
        torch.from_numpy(cached + 1),
        torch.from_numpy(slots.upper_table[rows, : int(cached.max()) // page_size + 1]),
        torch.from_numpy(pages * np.int32(page_size) + cached % page_size),
        torch.from_numpy(everyone[:-1]),
        len(rows),
    )


def _decodes(plan: Schedule) -> list[ComputedChunk]:
    return [
        ComputedChunk(s.num_prompt_tokens, s.num_computed, s.num_computed + 1, s.upper_pages, 1) for s in plan.decodes
    ]


def _prefills(plan: Schedule) -> list[ComputedChunk]:
    chunks = []
    for sequence, count in plan.prefills:
        num_drafts, end = len(plan.drafts.get(sequence, ())), sequence.num_computed + count
        num_asked = 1 + num_drafts if end == sequence.length else 0
        last = end + num_drafts
        chunks.append(
            ComputedChunk(sequence.num_prompt_tokens, sequence.num_computed, last, sequence.upper_pages, num_asked)
        )
    return chunks
