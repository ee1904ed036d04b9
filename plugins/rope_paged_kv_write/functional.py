"""RopePagedKvWrite without effects: pools come in, new pools go out. Two operators, for their numbers of results."""

import torch
from torch import Tensor

from plugins.registration import define_functional

FUNCTIONAL = "rope_paged_kv_write_functional"
DYNAMIC_FUNCTIONAL = "rope_paged_kv_write_dynamic_functional"

_TOKENS = "Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor slot_mapping, Tensor k_pool, Tensor v_pool"


def _write(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: float,
    v_scale: float,
) -> tuple[Tensor, Tensor]:
    pools = k_pool.clone(), v_pool.clone()
    write = torch.ops.kvforge.rope_paged_kv_write
    write(k, v, cos, sin, slot_mapping, *pools, None, None, k_scale, v_scale)
    return pools


def _write_dynamic(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pools = k_pool.clone(), v_pool.clone(), k_scales.clone(), v_scales.clone()
    torch.ops.kvforge.rope_paged_kv_write(k, v, cos, sin, slot_mapping, *pools)
    return pools


def _fake(k, v, cos, sin, slot_mapping, k_pool, v_pool, k_scale, v_scale) -> tuple[Tensor, Tensor]:
    return torch.empty_like(k_pool), torch.empty_like(v_pool)


def _fake_dynamic(k, v, cos, sin, slot_mapping, *pools) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(pool) for pool in pools)


define_functional(FUNCTIONAL, f"({_TOKENS}, float k_scale, float v_scale) -> (Tensor, Tensor)", _fake, _write)
define_functional(
    DYNAMIC_FUNCTIONAL,
    f"({_TOKENS}, Tensor k_scales, Tensor v_scales) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_dynamic,
    _write_dynamic,
)


def functional(*tokens_and_pools: Tensor, k_scale: float, v_scale: float) -> tuple[Tensor, ...]:
    """The tensors of `rope_paged_kv_write`, with or without scales; returns new pools and leaves the given ones."""
    if len(tokens_and_pools) == 9:
        return torch.ops.kvforge.rope_paged_kv_write_dynamic_functional(*tokens_and_pools)
    return torch.ops.kvforge.rope_paged_kv_write_functional(*tokens_and_pools, k_scale, v_scale)
