"""AttentionMass on the GPU: the specifications of its two Triton kernels, and their launch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.attention_mass.cuda_kernels import attention_mass_add_kernel, attention_mass_totals_kernel
from plugins.attention_mass.reference import SUM_AND_SQUARES
from plugins.errors import PluginError
from plugins.kv_quantization import LARGEST
from plugins.triton_cache import PoolLayout, capability_of, check_capability, layout_of
from plugins.triton_kernel import KernelSpec, Pointer, Size, ceil_div, run_kernel
from plugins.triton_search import num_tiles

_DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class MassBlocks:
    """`rows` of queries times heads whose totals are computed together, and `keys` of a block in both kernels."""

    rows: int
    keys: int


@dataclass(frozen=True)
class MassShape:
    """What the kernels know at compile time. Strides are elements, 0: contiguous.

    Raises PluginError for heads that are no multiple of the KV heads, and for a dtype of q without a kernel.
    """

    cache: PoolLayout
    q_dtype: torch.dtype
    heads: int
    scale: float
    kind: int
    q_stride: int = 0
    state_page_stride: int = 0

    def __post_init__(self) -> None:
        cache = self.cache
        object.__setattr__(self, "q_stride", self.q_stride or self.heads * cache.head_dim)
        object.__setattr__(self, "state_page_stride", self.state_page_stride or cache.page_size * cache.kv_heads)
        if self.q_dtype not in _DOT_TYPES:
            raise PluginError(f"q must be float32, float16 or bfloat16, not {self.q_dtype}.")
        if self.heads % cache.kv_heads:
            raise PluginError(f"q must have a multiple of k_pool's {cache.kv_heads} KV heads, not {self.heads}.")

    @property
    def group(self) -> int:
        return self.heads // self.cache.kv_heads

    @property
    def dot_dtype(self) -> torch.dtype:
        """In what the matrices are multiplied: q's dtype where that holds every cached number, else float32."""
        same = self.cache.dtype == self.q_dtype or self.cache.dtype in LARGEST
        return self.q_dtype if same else torch.float32

    @property
    def blocks(self) -> MassBlocks:
        """Blocks that fit any GPU's shared memory."""
        is_wide = self.cache.head_dim > 128
        rows = max(16, triton.next_power_of_2(self.group))
        if self.dot_dtype == torch.float32:  # for exactness, without tensor cores
            return MassBlocks(max(32, rows), 16 if self.cache.head_dim > 64 else 32)
        return MassBlocks(max(64, rows), 32 if is_wide else 64)


_INPUTS = ("query_start", "kv_length", "page_table", "state_table", "skipped")
_SIZES = (
    Size("num_sequences", "kv_length", 0),
    Size("max_pages", "page_table", 1),
    Size("max_state_pages", "state_table", 1),
)


def _inputs(shape: MassShape, *more: str) -> tuple[Pointer, ...]:
    pools = Pointer("q", shape.q_dtype), Pointer("k_pool", shape.cache.dtype)
    return (*pools, *(Pointer(name, torch.int32) for name in (*_INPUTS, *more)))


def _scales(shape: MassShape) -> tuple[Pointer, ...]:
    return (Pointer("k_scales", torch.float32),) if shape.cache.dynamic else ()


def _constants(shape: MassShape, blocks: MassBlocks) -> dict[str, Any]:
    cache = shape.cache
    absent: dict[str, Any] = {} if cache.dynamic else {"k_scales": None}
    return absent | {
        "Q_STRIDE": shape.q_stride,
        "QK_SCALE": shape.scale * cache.k_scale / math.log(2),  # the kernels' softmax has base 2
        "PAGE_SIZE": cache.page_size,
        "PAGE_STRIDE": cache.page_stride,
        "SCALES_PAGE_STRIDE": cache.scales_page_stride,
        "KV_HEADS": cache.kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": cache.head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(cache.head_dim)),
        "KEYS": blocks.keys,
        "DOT_TYPE": _DOT_TYPES[shape.dot_dtype],
    }


def totals_spec(shape: MassShape, blocks: MassBlocks) -> KernelSpec:
    """The largest logit and the total of every observed query and head: [T, heads, 2] float32."""
    tile, kv_heads = blocks.rows // shape.group, shape.cache.kv_heads
    return KernelSpec(
        name="attention_mass_totals",
        function=attention_mass_totals_kernel,
        inputs=(*_inputs(shape), *_scales(shape)),
        sizes=(Size("num_tokens", "q", 0), *_SIZES),
        outputs=(Pointer("totals", torch.float32),),
        constants=tuple((_constants(shape, blocks) | {"ROWS": blocks.rows}).items()),
        grid=lambda sizes: (num_tiles(sizes["num_tokens"], sizes["num_sequences"], tile), kv_heads, 1),
        num_warps=4,
        num_stages=2,
    )


def add_spec(shape: MassShape, blocks: MassBlocks) -> KernelSpec:
    """The statistics, given the totals of `totals_spec`; a program has `blocks.keys` slots of a KV head."""
    page_size, kv_heads = shape.cache.page_size, shape.cache.kv_heads
    states = [Pointer("mass", torch.float32), Pointer("squares", torch.float32)]
    constants = _constants(shape, blocks) | {
        "KIND": shape.kind,
        "STATE_PAGE_STRIDE": shape.state_page_stride,
        "GROUP_BLOCK": max(16, triton.next_power_of_2(shape.group)),
    }
    if shape.kind != SUM_AND_SQUARES:
        del states[1]
        constants |= {"squares": None, "squares_out": None}
    return KernelSpec(
        name="attention_mass_add",
        function=attention_mass_add_kernel,
        inputs=(Pointer("totals", torch.float32), *_inputs(shape, "scored"), *states, *_scales(shape)),
        sizes=_SIZES,
        outputs=tuple(Pointer(state.name + "_out", state.dtype) for state in states),
        constants=tuple(constants.items()),
        grid=lambda sizes: (ceil_div(sizes["max_pages"] * page_size, blocks.keys), sizes["num_sequences"], kv_heads),
        num_warps=4,
        num_stages=2,
    )


def launch(
    q: Tensor,
    k_pool: Tensor,
    query_start: Tensor,
    kv_length: Tensor,
    page_table: Tensor,
    state_table: Tensor,
    skipped: Tensor,
    scored: Tensor,
    scale: float,
    kind: int,
    mass: Tensor,
    squares: Tensor | None = None,
    k_scales: Tensor | None = None,
    k_scale: float = 1.0,
    *,
    wrap: Callable[[Any], Any] | None = None,
    blocks: MassBlocks | None = None,
) -> None:
    """Same arguments as `plugins.attention_mass`, on the GPU; float16 works as well.

    wrap: as in `plugins.triton_kernel.run_kernel`. blocks: their sizes, by default those that fit any GPU.
    Raises PluginError for dtypes, strides or a GPU that the kernels cannot serve; values are not checked.
    """
    q = q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()
    cache = layout_of(k_pool, k_pool, k_scales, k_scales, k_scale, k_scale)
    check_capability(cache.dtype, capability_of(q))
    if (squares is None) == (kind == SUM_AND_SQUARES):
        raise PluginError(f"squares go with kind {SUM_AND_SQUARES}, and with no other.")
    states = {"mass": mass} if squares is None else {"mass": mass, "squares": squares}
    if any(state.stride() != (mass.stride(0), cache.kv_heads, 1) for state in states.values()):
        raise PluginError("mass and squares must have the same strides and contiguous pages.")
    shape = MassShape(cache, q.dtype, q.shape[1], scale, kind, q.stride(0), mass.stride(0))
    blocks = blocks or shape.blocks
    tensors = {
        "q": q,
        "k_pool": k_pool,
        "query_start": query_start,
        "kv_length": kv_length,
        "page_table": page_table.contiguous(),
        "state_table": state_table.contiguous(),
        "skipped": skipped,
        "scored": scored,
        "totals": q.new_empty((*q.shape[:2], 2), dtype=torch.float32),
    }
    if k_scales is not None:
        tensors["k_scales"] = k_scales
    tensors |= states | {name + "_out": state for name, state in states.items()}
    run_kernel(totals_spec(shape, blocks), tensors, wrap)
    run_kernel(add_spec(shape, blocks), tensors, wrap)
