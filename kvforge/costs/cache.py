"""Bytes of K and V: what a token keeps, and what a decode step reads."""

import operator

from kvforge.common.number_formats import GROUP_BYTES, GROUP_SIZE, KV_FORMATS, SCALE_BYTES
from kvforge.kv_policies import Full, OwnerCache, of_cache
from model_defs import ModelConfig


def scale_bytes(kv_dtype: str, head_dim: int) -> int:
    """Return the bytes of the scales of one row of ``head_dim`` numbers, or its share of those of groups of tokens; 0
    where scales are static or there are none. ``kv_dtype`` is a key of ``KV_FORMATS``, here and below."""
    if KV_FORMATS[kv_dtype].is_grouped:
        return head_dim * GROUP_BYTES // GROUP_SIZE
    return SCALE_BYTES if KV_FORMATS[kv_dtype].scales == "dynamic" else 0


def owner_cache(model: ModelConfig, kv_dtype: str, page_size: int, exact_bits: int = 16) -> OwnerCache:
    """Return the cache of one owner, with exact pages of ``exact_bits`` a number where pages are sealed."""
    bits, scale = KV_FORMATS[kv_dtype].element_bits, scale_bytes(kv_dtype, model.head_dim)
    heads = model.num_kv_heads
    return OwnerCache(heads, model.head_dim, page_size, bits, scale, model.num_heads, exact_bits, model.kv_vectors)


def exact_bytes(
    model: ModelConfig, kv_dtype: str, page_size: int, exact_bits: int, num_sequences: int, num_tokens: int
) -> int:
    """Return the bytes of exact pages over all owners, for so many running sequences and tokens a step; 0 unless the
    format has groups."""
    sealing = of_cache(Full(), kv_dtype).sealing
    num_pages = 0 if sealing is None else sealing.num_exact_pages(num_sequences, num_tokens, page_size)
    return num_pages * page_size * cached_numbers(model) * exact_bits // 8


def cached_numbers(model: ModelConfig) -> int:
    """Return the numbers that one token keeps over all owners."""
    return sum(map(model.cached_numbers_of, model.owners))


def kv_element_bytes(model: ModelConfig, kv_dtype: str) -> int:
    """Return the bytes of K and V that one token keeps over all owners, without scales."""
    return sum(KV_FORMATS[kv_dtype].num_bytes(model.cached_numbers_of(owner)) for owner in model.owners)


def kv_scale_bytes(model: ModelConfig, kv_dtype: str) -> int:
    """Return the bytes of the scales, dynamic or of groups, of one token over all owners."""
    rows = model.kv_vectors * model.num_kv_heads
    return sum(rows * scale_bytes(kv_dtype, model.head_dim_of(owner)) for owner in model.owners)


def kv_bytes(model: ModelConfig, kv_dtype: str) -> int:
    """Return the bytes one token keeps in the cache over all owners: K, V and their scales."""
    return kv_element_bytes(model, kv_dtype) + kv_scale_bytes(model, kv_dtype)


def kv_read_bytes(model: ModelConfig, kv_dtype: str, context: float) -> float:
    """Return the bytes of cache that one decode token reads which attends ``context`` keys: every layer reads its
    owner's, no more of it than its window. The floor of a step counts each owner once instead: ``context * kv_bytes``.
    """
    keys = [min(context, window) if window else context for window in model.layer_windows]
    read = [model.cached_numbers_of(owner) for owner in model.owner_of_layer]
    return kv_bytes(model, kv_dtype) / cached_numbers(model) * sum(map(operator.mul, keys, read))
