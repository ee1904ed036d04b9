"""EvictSlots in Triton: one program per sequence and KV head chooses, one per tile of its moves moves."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from plugins.errors import PluginError
from plugins.evict_slots.cuda_kernels import evict_slots_choose_kernel, evict_slots_move_kernel
from plugins.triton_cache import PoolLayout, layout_of
from plugins.triton_kernel import KernelSpec, Pointer, Size, ceil_div, run_kernel

_BLOCK = 512
_TILE = 16
_INT32 = torch.int32


def choose_spec(page_size: int, kv_heads: int, block: int = _BLOCK) -> KernelSpec:
    """The kernel that lists the moves, looking at `block` slots at once; all tensors are contiguous."""
    inputs = ("keep", "kv_length", "sealed", "shift", "state_table", "position")
    return KernelSpec(
        name="evict_slots_choose",
        function=evict_slots_choose_kernel,
        inputs=(Pointer("score", torch.float32), *(Pointer(name, _INT32) for name in inputs)),
        sizes=(
            Size("num_sequences", "score", 0),
            Size("total", "score", 2),
            Size("state_width", "state_table", 1),
        ),
        outputs=tuple(Pointer(name, _INT32) for name in ("position_out", "holes", "movers", "num_moves")),
        constants=(("PAGE_SIZE", page_size), ("KV_HEADS", kv_heads), ("BLOCK", block)),
        grid=lambda sizes: (sizes["num_sequences"], kv_heads, 1),
        num_warps=4,
    )


def move_spec(cache: PoolLayout, mass: bool, squares: bool, tile: int = _TILE) -> KernelSpec:
    """The kernel that moves; e4m3 moves as int8, so that any GPU can."""
    dtype = torch.int8 if cache.dtype.itemsize == 1 else cache.dtype
    given = {"k_scales": cache.dynamic, "v_scales": cache.dynamic, "mass": mass, "squares": squares}
    in_place = [Pointer("position", _INT32), Pointer("k_pool", dtype), Pointer("v_pool", dtype)]
    in_place += [Pointer(name, torch.float32) for name, present in given.items() if present]
    lists = ("holes", "movers", "num_moves", "sealed", "shift", "page_table", "state_table")
    return KernelSpec(
        name="evict_slots_move",
        function=evict_slots_move_kernel,
        inputs=(*(Pointer(name, _INT32) for name in lists), *in_place),
        sizes=(
            Size("num_sequences", "holes", 0),
            Size("total", "holes", 2),
            Size("page_width", "page_table", 1),
            Size("state_width", "state_table", 1),
        ),
        outputs=tuple(Pointer(pointer.name + "_out", pointer.dtype) for pointer in in_place),
        constants=(
            *((name + end, None) for name, present in given.items() if not present for end in ("", "_out")),
            ("PAGE_SIZE", cache.page_size),
            ("PAGE_STRIDE", cache.page_stride),
            ("SCALES_PAGE_STRIDE", cache.scales_page_stride),
            ("KV_HEADS", cache.kv_heads),
            ("HEAD_DIM", cache.head_dim),
            ("DIM_BLOCK", triton.next_power_of_2(cache.head_dim)),
            ("TILE", tile),
        ),
        # At most half of the slots move: from behind the first `keep` to among them.
        grid=lambda sizes: (ceil_div(sizes["total"], 2 * tile), cache.kv_heads, sizes["num_sequences"]),
        num_warps=4,
    )


def launch(
    score: Tensor,
    keep: Tensor,
    kv_length: Tensor,
    sealed: Tensor,
    shift: Tensor,
    page_table: Tensor,
    state_table: Tensor,
    position: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    mass: Tensor | None = None,
    squares: Tensor | None = None,
    *,
    wrap: Callable[[Any], Any] | None = None,
    block: int = _BLOCK,
) -> None:
    """Same arguments as `plugins.evict_slots`, on the GPU; wrap: as in `plugins.triton_kernel.run_kernel`.

    Raises PluginError for strides that the kernels cannot serve; values are not checked.
    """
    cache = layout_of(k_pool, v_pool, k_scales, v_scales, 1.0, 1.0)
    given = {"position": position, "mass": mass, "squares": squares}
    for name, tensor in given.items():
        if tensor is not None and not tensor.is_contiguous():
            raise PluginError(f"{name} must be contiguous; allocate it as the runtime does.")
    bytes_of = (lambda pool: pool.view(torch.int8)) if cache.dtype.itemsize == 1 else (lambda pool: pool)
    given |= {"k_pool": bytes_of(k_pool), "v_pool": bytes_of(v_pool), "k_scales": k_scales, "v_scales": v_scales}
    in_place = {name: tensor for name, tensor in given.items() if tensor is not None}
    lists = {"keep": keep, "kv_length": kv_length, "sealed": sealed, "shift": shift}
    lists |= {"score": score, "page_table": page_table, "state_table": state_table}
    holes, movers = (torch.empty(score.shape, dtype=_INT32, device=score.device) for _ in range(2))
    tensors = {name: tensor.contiguous() for name, tensor in lists.items()}
    tensors |= {
        "holes": holes,
        "movers": movers,
        "num_moves": torch.empty(score.shape[:2], dtype=_INT32, device=score.device),
    }
    tensors |= in_place | {name + "_out": tensor for name, tensor in in_place.items()}
    run_kernel(choose_spec(cache.page_size, cache.kv_heads, block), tensors, wrap)
    run_kernel(move_spec(cache, mass is not None, squares is not None), tensors, wrap)
