"""Attention at the shape of Llama-3.1-8B: cases, their tensors, their floors, and what others take for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import plugins
from perf.gpu.timing import best_seconds
from plugins.kv_quantization import LARGEST, dynamic_scale, quantize

PAGE_SIZE = 64
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Case:
    """``sequences`` of ``length`` positions, of which the last ``queries`` ask: all of them or one."""

    sequences: int
    queries: int
    length: int
    dtype: str

    @property
    def kind(self) -> str:
        """Of the step that has such attention."""
        return "decode" if self.queries == 1 else "prefill"

    @property
    def name(self) -> str:
        """In tables."""
        return f"{self.kind} {self.sequences}x{self.length} {self.dtype}"

    @property
    def flops(self) -> float:
        """Of the causal half."""
        return 4 * self.sequences * HEADS * HEAD_DIM * self.queries * (self.length - (self.queries - 1) / 2)

    @property
    def num_bytes(self) -> int:
        """That must be moved at least: K and V with their scales, q and the result."""
        dtype = DTYPES[self.dtype]
        per_head = HEAD_DIM * dtype.itemsize + (4 if dtype in LARGEST else 0)
        return self.sequences * (2 * self.length * KV_HEADS * per_head + 2 * self.queries * HEADS * HEAD_DIM * 2)


def cache(pages: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return random pools, with dynamic scales where ``dtype`` has 8 bits."""
    pools, scales = [], []
    for _ in range(2):
        values = torch.randn(pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device)
        if dtype in LARGEST:
            scales.append(dynamic_scale(values, dtype))
            values = quantize(values, scales[-1][..., None], dtype)
        pools.append(values.to(dtype))
    return [*pools, *scales]


@dataclass(frozen=True)
class Tensors:
    """A case's arguments; pages lie in a random order."""

    case: Case
    q: Tensor
    pools: list[Tensor]
    starts: Tensor
    lengths: Tensor
    table: Tensor

    @classmethod
    def of(cls, case: Case, device: str) -> "Tensors":
        """Draw them."""
        width = -(-case.length // PAGE_SIZE)
        return cls(
            case,
            torch.randn(case.sequences * case.queries, HEADS, HEAD_DIM, device=device).bfloat16(),
            cache(case.sequences * width, DTYPES[case.dtype], device),
            torch.arange(0, case.sequences * case.queries + 1, case.queries, device=device).int(),
            torch.full((case.sequences,), case.length, device=device).int(),
            torch.randperm(case.sequences * width, device=device).view(case.sequences, width).int(),
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of ``plugins.paged_attention`` and of the kernels' ``launch``."""
        scales = self.pools[2:] or (None, None)
        return (self.q, *self.pools[:2], self.starts, self.lengths, self.table, HEAD_DIM**-0.5, 0, *scales)

    @property
    def scale_arguments(self) -> dict[str, Tensor]:
        """FA3's scales of an FP8 cache: one for each sequence and KV head; theirs is 1, which times as any other."""
        names = ("q_descale", "k_descale", "v_descale") if self.case.dtype == "fp8" else ()
        return {name: torch.ones(self.case.sequences, KV_HEADS, device=self.q.device) for name in names}

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, K and V as contiguous ``[S, heads, length, head_dim]`` of bf16."""
        case = self.case
        k, v = (
            pool[self.table.long()].view(case.sequences, -1, KV_HEADS, HEAD_DIM)[:, : case.length].transpose(1, 2)
            for pool in self.pools[:2]
        )
        q = self.q.view(case.sequences, case.queries, HEADS, HEAD_DIM).transpose(1, 2)
        return q.contiguous(), k.contiguous(), v.contiguous()


def ours(tensors: Tensors) -> Callable[[], Tensor]:
    """Return this project's attention, on pages."""
    return lambda: plugins.paged_attention(*tensors.arguments)


def torchs(tensors: Tensors, backend: str) -> Callable[[], Tensor]:
    """Return torch's attention by one of ``SDPA``'s backends, on dense tensors.

    Raises:
        RuntimeError: of the call, where the backend is not there or does not take the case.
    """
    q, k, v = tensors.dense()
    causal = tensors.case.queries == tensors.case.length

    def run() -> Tensor:
        with sdpa_kernel(SDPA[backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return run


def fa3(tensors: Tensors) -> Callable[[], Tensor]:
    """Return FlashAttention 3 on the same pages.

    Raises:
        ImportError: it is not installed.
    """
    from flash_attn_interface import flash_attn_with_kvcache

    case = tensors.case
    q = tensors.q.view(case.sequences, case.queries, HEADS, HEAD_DIM)
    q = q.to(torch.float8_e4m3fn) if case.dtype == "fp8" else q
    return lambda: flash_attn_with_kvcache(
        q,
        *tensors.pools[:2],
        cache_seqlens=tensors.lengths,
        page_table=tensors.table,
        causal=True,
        **tensors.scale_arguments,
    )


def others_seconds(tensors: Tensors, device: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return the seconds of each that can do the case, and why each of the rest cannot, in its own words."""
    makers: dict[str, Callable[[], Callable[[], Tensor]]] = {}
    if tensors.case.dtype == "bf16":
        makers = {name: lambda name=name: torchs(tensors, name) for name in SDPA}  # type: ignore[misc]
    if tensors.case.dtype != "int8":
        makers["fa3"] = lambda: fa3(tensors)
    seconds, why = {}, {}
    for name, make in makers.items():
        try:
            seconds[name] = best_seconds(make(), device)
        except (ImportError, RuntimeError, TypeError, AttributeError) as error:  # of another's code
            why[name] = (str(error) or type(error).__name__).splitlines()[0][:160]
    return seconds, why
