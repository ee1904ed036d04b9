"""What a KV policy puts between a layer's rotated queries and its attention."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

Pool = tuple[Tensor, ...]
"""The cache of one owner: K and V pool, each ``[pages, page_size, kv_heads, head_dim]``, and for dynamic 8-bit formats
their float32 scales, each ``[pages, page_size, kv_heads]``; then what the KV policy keeps."""


class Pages(NamedTuple):
    """Which tokens the sequences of a packed step have, and where: ``query_start`` ``[S+1]``, ``kv_length`` ``[S]`` and
    ``page_table`` ``[S, M]``, all int32."""

    query_start: Tensor
    kv_length: Tensor
    page_table: Tensor


class BeforeAttention(Protocol):
    """Changes the cache of one owner, or what the policy keeps beside it, in place before a layer reads it."""

    def __call__(self, q: Tensor, pool: Pool, pages: Pages, scale: float, k_scale: float) -> Pool:
        """``q`` ``[T, heads, d]`` is rotated, ``pool`` the owner's: K and V, their scales where there are any, then the
        policy's ``CacheInsertion.num_pools``. The other arguments are those of the attention that follows. Returns the
        pool as it is then, whose tensors are those given but in a graph without effects."""


class AfterWrite(Protocol):
    """Does more to the cache of one owner where a step's K and V have just been written."""

    def __call__(self, pool: Pool, pages: Pages) -> None:
        """``pool`` is the owner's; ``pages`` are the step's: see ``BeforeAttention``."""


class Attention(Protocol):
    """Attends in a layer, in the place of ``paged_attention`` over the step's pages."""

    def __call__(
        self, q: Tensor, pool: Pool, pages: Pages, scale: float, kv_scales: tuple[float, float], window: int
    ) -> Tensor:
        """Return ``[T, heads, d]``; arguments as ``BeforeAttention``'s, ``kv_scales`` are those of K and of V. Queries
        see the last ``window`` tokens, all where it is 0."""


class AfterAttention(Protocol):
    """Looks at what attention does to hidden states, and changes what the policy keeps beside an owner's cache."""

    def __call__(self, before: Tensor, after: Tensor, pool: Pool, query_start: Tensor) -> None:
        """``before`` and ``after`` ``[T, hidden]`` are the residual stream; the others as ``BeforeAttention``'s."""


@dataclass(frozen=True, kw_only=True)
class CacheInsertion:
    """A policy's part of the graphs ``lower`` and ``upper``. The ``inputs`` of its methods are the policy's, int32
    ``[S]`` or ``[S, Ms]``."""

    num_pools: int
    """Tensors of the policy at the end of an owner's pool."""
    needs_positions: bool = False
    """Graphs have buffers with cos and sin of every position."""
    owners_share: bool = False
    """All owners have one pool, in which the pages of each follow those of the owner before."""

    def begin(self, inputs: tuple[Tensor, ...], tables: tuple[Tensor, ...]) -> BeforeAttention | None:
        """Return what each layer of a step calls before its attention, None for nothing; ``tables`` are cos and sin
        ``[positions, head_dim/2]`` float32, none without ``needs_positions``."""
        return None

    def after_write(self, inputs: tuple[Tensor, ...]) -> AfterWrite | None:
        """Return what is called for each owner whose K and V a step has written, None for nothing."""
        return None

    def attention(self, inputs: tuple[Tensor, ...]) -> Attention | None:
        """Return what each layer of a step attends with, None for all tokens in its sequences' pages."""
        return None

    def after_attention(self, inputs: tuple[Tensor, ...]) -> AfterAttention | None:
        """Return what each layer of a step calls behind its attention, None for nothing."""
        return None
