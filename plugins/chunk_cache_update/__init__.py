"""ChunkCacheUpdate: which selected chunks are not in their places yet, and which places they take (ShadowKV)."""

from typing import Any

import torch
from torch import Tensor

from plugins.chunk_cache_update.reference import reference
from plugins.operator import Operator
from plugins.registration import define, define_schema, writes_are_functional


def _fake(selected: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(selected), torch.empty_like(selected)


OPERATOR = define(Operator(reference, version=2, writes=("cached", "counts")), _fake)
chunk_cache_update = OPERATOR.call

FUNCTIONAL = "chunk_cache_update_functional"
"""The operator without effects, which graphs are traced from; nothing runs it."""


def _fake_functional(selected: Tensor, cached: Tensor, counts: Tensor, slot: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(one) for one in (selected, selected, cached, counts))


define_schema(
    FUNCTIONAL, "(Tensor selected, Tensor cached, Tensor counts, Tensor slot) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_functional,
)  # fmt: skip


def updated_chunks(selected: Tensor, cached: Tensor, counts: Tensor, slot: Tensor) -> tuple[Tensor, ...]:
    """As `chunk_cache_update`; returns (chunks, places, cached, counts), of which the last two are those given (SSA
    style). Under `plugins.registration.functional_writes` they are new ones."""
    if writes_are_functional():
        return tuple(getattr(torch.ops.kvforge, FUNCTIONAL)(selected, cached, counts, slot))
    return (*chunk_cache_update(selected, cached, counts, slot), cached, counts)
