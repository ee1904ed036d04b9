"""PagedAttention in Triton: split-KV decode (`partial_spec`), and prefill tiles with the merge of the splits
(`combine_spec`)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.errors import PluginError
from plugins.kv_quantization import INT4, LARGEST
from plugins.kv_rotation import rotate_blocks
from plugins.paged_attention.cuda_combine import paged_attention_combine_kernel
from plugins.paged_attention.cuda_partial import paged_attention_partial_kernel
from plugins.paged_attention.cuda_tuning import Tuning, default_tuning
from plugins.triton_cache import PoolLayout, capability_of, check_capability, layout_of
from plugins.triton_kernel import KernelSpec, Pointer, Size, run_kernel
from plugins.triton_search import num_tiles

_MERGED = 8192  # partial sums that one program reads together
_DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class AttentionShape:
    """What the kernels know at compile time. `q_stride`: elements from token to token (0: contiguous).

    Raises PluginError for heads that are no multiple of the KV heads, and for a dtype of q without a kernel.
    """

    cache: PoolLayout
    q_dtype: torch.dtype
    heads: int
    scale: float
    window: int = 0
    q_stride: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "q_stride", self.q_stride or self.heads * self.cache.head_dim)
        if self.q_dtype not in _DOT_TYPES:
            raise PluginError(f"q must be float32, float16 or bfloat16, not {self.q_dtype}.")
        if self.heads % self.cache.kv_heads:
            raise PluginError(f"q must have a multiple of the pools' {self.cache.kv_heads} KV heads, not {self.heads}.")

    @property
    def group(self) -> int:
        return self.heads // self.cache.kv_heads

    @property
    def dot_dtype(self) -> torch.dtype:
        """In what the matrices are multiplied: q's dtype where that holds every cached number, else float32."""
        same = self.cache.dtype == self.q_dtype or self.cache.dtype in LARGEST
        return self.q_dtype if same else torch.float32

    @property
    def out_dtype(self) -> torch.dtype:
        """The kernels' result: of int4 it is still to be rotated back, in float32."""
        return torch.float32 if self.cache.dtype == INT4 else self.q_dtype

    def tuning(self, capability: int = 90) -> Tuning:
        cache = self.cache
        return default_tuning(cache.head_dim, self.group, cache.kv_heads, self.dot_dtype, cache.dtype, capability)

    def partial_shape(self, sequences: Any, tuning: Tuning) -> tuple[Any, int, int, int]:
        """Shape of the float32 tensor between the two kernels."""
        return sequences, self.heads, tuning.num_splits, self.cache.head_dim + 2


def _inputs(shape: AttentionShape) -> tuple[Pointer, ...]:
    cache = shape.cache
    scales = [Pointer("k_scales", torch.float32), Pointer("v_scales", torch.float32)] if cache.dynamic else []
    return (
        Pointer("q", shape.q_dtype),
        Pointer("k_pool", cache.dtype),
        Pointer("v_pool", cache.dtype),
        Pointer("query_start", torch.int32),
        Pointer("kv_length", torch.int32),
        Pointer("page_table", torch.int32),
        *scales,
    )


_SEQUENCE_SIZES = (Size("num_sequences", "kv_length", 0), Size("max_pages", "page_table", 1))


def _constants(shape: AttentionShape, tuning: Tuning) -> dict[str, Any]:
    cache = shape.cache
    absent: dict[str, Any] = {} if cache.dynamic else {"k_scales": None, "v_scales": None}
    return absent | {
        "Q_STRIDE": shape.q_stride,
        "QK_SCALE": shape.scale * cache.k_scale / math.log(2),  # the kernels' softmax has base 2
        "WINDOW": shape.window,
        "PAGE_SIZE": cache.page_size,
        "PAGE_STRIDE": cache.page_stride,
        "SCALES_PAGE_STRIDE": cache.scales_page_stride,
        "KV_HEADS": cache.kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": cache.head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(cache.head_dim)),
        "NUM_SPLITS": tuning.num_splits,
        "MIN_SPLIT": tuning.min_split,
        "DOT_TYPE": _DOT_TYPES[shape.dot_dtype],
    }


def partial_spec(shape: AttentionShape, tuning: Tuning) -> KernelSpec:
    """Decode: partial results of the sequences with exactly one query, `AttentionShape.partial_shape` float32."""
    blocks, kv_heads, splits = tuning.decode, shape.cache.kv_heads, tuning.num_splits
    constants = _constants(shape, tuning) | {"ROWS": blocks.rows, "KEYS": blocks.keys}
    return KernelSpec(
        name="paged_attention_partial",
        function=paged_attention_partial_kernel,
        inputs=_inputs(shape),
        sizes=_SEQUENCE_SIZES,
        outputs=(Pointer("partial", torch.float32),),
        constants=tuple(constants.items()),
        grid=lambda sizes: (sizes["num_sequences"], kv_heads, splits),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def combine_spec(shape: AttentionShape, tuning: Tuning) -> KernelSpec:
    """Prefill tiles, and the merge of `partial`; with no splits in `tuning` there is no such input."""
    blocks, kv_heads = tuning.prefill, shape.cache.kv_heads
    tile = blocks.rows // shape.group
    partial = (Pointer("partial", torch.float32),) if tuning.num_splits else ()
    constants = _constants(shape, tuning)
    group_block = triton.next_power_of_2(shape.group)
    constants |= {
        "V_SCALE": shape.cache.v_scale,
        "GROUP_BLOCK": group_block,
        "SPLITS_BLOCK": min(
            triton.next_power_of_2(max(1, tuning.num_splits)),
            max(1, _MERGED // (group_block * constants["BLOCK_D"])),
        ),
        "ROWS": blocks.rows,
        "KEYS": blocks.keys,
        "DECODE_KEYS": tuning.decode.keys,
    }
    if not partial:
        constants["partial"] = None
    return KernelSpec(
        name="paged_attention_combine",
        function=paged_attention_combine_kernel,
        inputs=(*_inputs(shape), *partial),
        sizes=(Size("num_tokens", "q", 0), *_SEQUENCE_SIZES),
        outputs=(Pointer("out", shape.out_dtype),),
        constants=tuple(constants.items()),
        grid=lambda sizes: (num_tiles(sizes["num_tokens"], sizes["num_sequences"], tile), kv_heads, 1),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def launch(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    query_start: Tensor,
    kv_length: Tensor,
    page_table: Tensor,
    scale: float,
    window: int = 0,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    rotates_keys: bool = False,
    *,
    wrap: Callable[[Any], Any] | None = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """Same arguments and result as `plugins.paged_attention`, on the GPU; float16 works as well.

    wrap: as in `plugins.triton_kernel.run_kernel`. tuning: block sizes, by default those for q's GPU.
    Raises PluginError for sinks, rotated keys in int8, dtypes, strides or a GPU that the kernels cannot serve; values
    are not checked.
    """
    if sinks is not None:
        raise PluginError("paged_attention has no sinks on a GPU; run the model on a CPU.")
    if rotates_keys:
        raise PluginError("paged_attention reads no rotated keys in int8 on a GPU; build the engine for a GPU.")
    q = q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()
    cache = layout_of(k_pool, v_pool, k_scales, v_scales, k_scale, v_scale)
    token_stride = 0 if cache.dtype == INT4 else q.stride(0)
    shape = AttentionShape(cache, q.dtype, q.shape[1], scale, window, token_stride)
    check_capability(cache.dtype, capability_of(q))
    tuning = tuning or shape.tuning(capability_of(q))
    rotated = cache.dtype == INT4
    out = q.new_empty(q.shape, dtype=shape.out_dtype)
    tensors = {
        "q": rotate_blocks(q).to(q.dtype) if rotated else q,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "query_start": query_start,
        "kv_length": kv_length,
        "page_table": page_table.contiguous(),
        "out": out,
    }
    if k_scales is not None and v_scales is not None:
        tensors |= {"k_scales": k_scales, "v_scales": v_scales}
    if tuning.num_splits:
        partial_shape = shape.partial_shape(kv_length.shape[0], tuning)
        tensors["partial"] = q.new_empty(partial_shape, dtype=torch.float32)
        run_kernel(partial_spec(shape, tuning), tensors, wrap)
    run_kernel(combine_spec(shape, tuning), tensors, wrap)
    return rotate_blocks(out).to(q.dtype) if rotated else out
