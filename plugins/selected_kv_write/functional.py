"""SelectedKvWrite without effects, in two steps: LowRankKeyReconstruct, then keys and values go to their places.

Graphs are traced from these; nothing runs the second.
"""

from typing import Any

import torch
from torch import Tensor

from plugins.low_rank_key_reconstruct import OPERATOR as RECONSTRUCT
from plugins.operator import NAMESPACE
from plugins.registration import define_schema

PLACE = "selected_kv_place_functional"
PLACED = ("keys", "host_v", "slot", "chunks", "places", "shadow_table", "page_table", "k_pool", "v_pool")
"""What the second step takes, beside chunk_size: the keys [S, kv_heads, n * chunk_size, head_dim] of the lists, and
arguments of the operator."""


def _fake(*given: Any) -> tuple[Tensor, Tensor]:
    named = dict(zip(PLACED, given, strict=False))
    return torch.empty_like(named["k_pool"]), torch.empty_like(named["v_pool"])


_parameters = ", ".join(f"Tensor {name}" for name in PLACED)
define_schema(PLACE, f"({_parameters}, int chunk_size) -> (Tensor, Tensor)", _fake)


def write(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The new pools, for the operator's arguments by name."""
    of_reconstruct = [given[argument.name] for argument in RECONSTRUCT.arguments]
    keys = RECONSTRUCT.call(*of_reconstruct)
    known = {**given, "keys": keys}
    place = getattr(getattr(torch.ops, NAMESPACE), PLACE)
    k_pool, v_pool = place(*(known[name] for name in PLACED), given["chunk_size"])
    return k_pool, v_pool
