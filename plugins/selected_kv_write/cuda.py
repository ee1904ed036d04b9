"""SelectedKvWrite in Triton: one program per token, all its heads."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.errors import PluginError
from plugins.triton_kernel import KernelSpec, Pointer, Size, run_kernel


@triton.jit
def selected_kv_write_kernel(
    keys,
    host_v,
    rows,
    targets,
    k_pool,
    v_pool,
    num_tokens,
    k_pool_out,
    v_pool_out,
    K_PAGE: tl.constexpr,
    V_PAGE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    if k_pool is None:  # a graph of torch gives what is updated in place as the output alone
        k_pool = k_pool_out
        v_pool = v_pool_out
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_BLOCK)
    target = tl.load(targets + token * KV_HEADS + head, head < KV_HEADS, other=-1)
    if tl.max(target, axis=0) < 0:
        return
    present = target >= 0
    row = tl.load(rows + token * KV_HEADS + head, present, other=0).to(tl.int64)
    column = tl.arange(0, DIM_BLOCK)
    mask = present[:, None] & (column < HEAD_DIM)[None, :]
    element = head[:, None] * HEAD_DIM + column[None, :]
    key = tl.load(keys + token * (KV_HEADS * HEAD_DIM) + element, mask)
    value = tl.load(host_v + row[:, None] * (KV_HEADS * HEAD_DIM) + element, mask)
    page = (target // PAGE_SIZE).to(tl.int64)[:, None]
    element += (target % PAGE_SIZE)[:, None] * (KV_HEADS * HEAD_DIM)
    tl.store(k_pool + page * K_PAGE + element, key, mask)
    tl.store(v_pool + page * V_PAGE + element, value, mask)


def kernel_spec(
    dtype: torch.dtype, page_size: int, kv_heads: int, head_dim: int, k_page: int = 0, v_page: int = 0
) -> KernelSpec:
    """The kernel for tensors of `dtype`; k_page, v_page: elements from page to page (default: contiguous)."""
    names = ("keys", "host_v", "rows", "targets", "k_pool", "v_pool")
    return KernelSpec(
        name="selected_kv_write",
        function=selected_kv_write_kernel,
        inputs=tuple(Pointer(name, torch.int32 if name in ("rows", "targets") else dtype) for name in names),
        sizes=(Size("num_tokens", "targets", 0),),
        outputs=(Pointer("k_pool_out", dtype), Pointer("v_pool_out", dtype)),
        constants=(
            ("K_PAGE", k_page or page_size * kv_heads * head_dim),
            ("V_PAGE", v_page or page_size * kv_heads * head_dim),
            ("PAGE_SIZE", page_size),
            ("KV_HEADS", kv_heads),
            ("HEAD_DIM", head_dim),
            ("HEADS_BLOCK", triton.next_power_of_2(kv_heads)),
            ("DIM_BLOCK", triton.next_power_of_2(head_dim)),
        ),
        grid=lambda sizes: (sizes["num_tokens"], 1, 1),
        num_warps=4,
    )


def launch(
    keys: Tensor,
    host_v: Tensor,
    rows: Tensor,
    targets: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    wrap: Callable[[Any], Any] | None = None,
) -> None:
    """Same arguments as `plugins.selected_kv_write`, on the GPU; `host_v` may be in pinned host memory.

    wrap: as in `plugins.triton_kernel.run_kernel`. Raises PluginError for pools or host values whose pages are not
    contiguous; values are not checked.
    """
    _, page_size, kv_heads, head_dim = k_pool.shape
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.stride()[1:] != (kv_heads * head_dim, head_dim, 1):
            raise PluginError(f"Each page of {name} must be contiguous; allocate the pools as the runtime does.")
    if not host_v.is_contiguous():
        raise PluginError("host_v must be contiguous; allocate it as the runtime does.")
    tensors = {
        "keys": keys.contiguous(),
        "host_v": host_v,
        "rows": rows.contiguous(),
        "targets": targets.contiguous(),
        "k_pool": k_pool,
        "v_pool": v_pool,
        "k_pool_out": k_pool,
        "v_pool_out": v_pool,
    }
    spec = kernel_spec(keys.dtype, page_size, kv_heads, head_dim, k_pool.stride(0), v_pool.stride(0))
    run_kernel(spec, tensors, wrap)
