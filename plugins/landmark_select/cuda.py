"""LandmarkSelect on the GPU: the specifications of its two Triton kernels, and their launch."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from plugins.errors import PluginError
from plugins.landmark_select.cuda_kernels import landmark_select_choose_kernel, landmark_select_scores_kernel
from plugins.triton_kernel import KernelSpec, Pointer, Size, ceil_div, run_kernel

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BLOCK = 1024


def scores_spec(
    dtype: torch.dtype, chunks_per_page: int, kv_heads: int, heads: int, head_dim: int, scale: float
) -> KernelSpec:
    """The logits [S, heads, Ms * chunks_per_page] float32 of all chunks, -inf where one cannot be selected.

    All tensors are contiguous. Raises PluginError for a dtype of q and landmarks that the kernel lacks.
    """
    if dtype not in _DTYPES:
        raise PluginError(f"q must be float32, float16 or bfloat16, not {dtype}.")
    tile = 32 if dtype == torch.float32 or head_dim > 128 else 64
    return KernelSpec(
        name="landmark_select_scores",
        function=landmark_select_scores_kernel,
        inputs=(
            Pointer("q", dtype),
            Pointer("landmarks", dtype),
            Pointer("is_outlier", torch.uint8),
            Pointer("query_start", torch.int32),
            Pointer("table", torch.int32),
            Pointer("num_chunks", torch.int32),
        ),
        sizes=(Size("width", "table", 1), Size("num_sequences", "num_chunks", 0)),
        outputs=(Pointer("scores", torch.float32),),
        constants=(
            ("SCALE", scale),
            ("CHUNKS_PER_PAGE", chunks_per_page),
            ("KV_HEADS", kv_heads),
            ("GROUP", heads // kv_heads),
            ("HEAD_DIM", head_dim),
            ("GROUP_BLOCK", max(16, triton.next_power_of_2(heads // kv_heads))),
            ("DIM_BLOCK", max(16, triton.next_power_of_2(head_dim))),
            ("TILE", tile),
        ),
        grid=lambda sizes: (
            ceil_div(sizes["width"] * chunks_per_page, tile),
            sizes["num_sequences"],
            kv_heads,
        ),
        num_warps=4,
    )


def choose_spec(kv_heads: int, heads: int, max_selected: int, block: int = _BLOCK) -> KernelSpec:
    """The chunks of the highest scores, given the logits of `scores_spec`; `block` chunks are read at a time."""
    return KernelSpec(
        name="landmark_select_choose",
        function=landmark_select_choose_kernel,
        inputs=(
            Pointer("scores", torch.float32),
            Pointer("num_chunks", torch.int32),
            Pointer("num_selected", torch.int32),
        ),
        sizes=(Size("num_sequences", "num_chunks", 0), Size("total", "scores", 2)),
        outputs=(Pointer("selected", torch.int32),),
        constants=(
            ("KV_HEADS", kv_heads),
            ("GROUP", heads // kv_heads),
            ("MAX_SELECTED", max_selected),
            ("GROUP_BLOCK", triton.next_power_of_2(heads // kv_heads)),
            ("SELECTED_BLOCK", triton.next_power_of_2(max(1, max_selected))),
            ("BLOCK", block),
        ),
        grid=lambda sizes: (sizes["num_sequences"], kv_heads, 1),
        num_warps=8,
    )


def launch(
    q: Tensor,
    landmarks: Tensor,
    is_outlier: Tensor,
    query_start: Tensor,
    table: Tensor,
    num_chunks: Tensor,
    num_selected: Tensor,
    scale: float,
    max_selected: int,
    *,
    wrap: Callable[[Any], Any] | None = None,
    block: int = _BLOCK,
) -> Tensor:
    """Same arguments and result as `plugins.landmark_select`, on the GPU; float16 works as well.

    wrap: as in `plugins.triton_kernel.run_kernel`. Values are not checked.
    """
    _, chunks_per_page, kv_heads, head_dim = landmarks.shape
    sequences, heads = num_chunks.shape[0], q.shape[1]
    tensors = {
        "q": q.contiguous(),
        "landmarks": landmarks.contiguous(),
        "is_outlier": is_outlier.contiguous(),
        "query_start": query_start,
        "table": table.contiguous(),
        "num_chunks": num_chunks,
        "num_selected": num_selected,
        "scores": q.new_empty((sequences, heads, table.shape[1] * chunks_per_page), dtype=torch.float32),
        "selected": table.new_empty((sequences, kv_heads, max_selected)),
    }
    run_kernel(scores_spec(q.dtype, chunks_per_page, kv_heads, heads, head_dim, scale), tensors, wrap)
    run_kernel(choose_spec(kv_heads, heads, max_selected, block), tensors, wrap)
    return tensors["selected"]
