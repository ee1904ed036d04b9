"""ChunkCacheUpdate: which selected chunks are not in their places yet, and which places they take (ShadowKV)."""

from typing import Any

import torch
from torch import Tensor

from plugins.chunk_cache_update.reference import reference
from plugins.operator import Operator
from plugins.registration import define


def _fake(selected: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(selected), torch.empty_like(selected)


OPERATOR = define(Operator(reference, version=2, writes=("cached", "counts")), _fake)
chunk_cache_update = OPERATOR.call
