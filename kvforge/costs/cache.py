"""Bytes of K and V: what a token keeps, and what a decode step reads."""

import math
import operator
from collections.abc import Iterable

from kvforge.common.number_formats import ELEMENT_BYTES, GROUP_BYTES, GROUP_SIZE, KV_FORMATS, SCALE_BYTES
from kvforge.kv_policies import Full, OwnerCache, of_cache
from kvforge.kv_policies.visibility import visibility_of
from model_defs import ModelConfig
from model_defs.kv_layout import NO_OWNER


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


def kv_element_bytes(model: ModelConfig, kv_dtype: str, owners: Iterable[int] | None = None) -> int:
    """Return the bytes of K and V that one token keeps over ``owners`` (default: all), without scales."""
    chosen = model.owners if owners is None else owners
    return sum(KV_FORMATS[kv_dtype].num_bytes(model.cached_numbers_of(owner)) for owner in chosen)


def kv_scale_bytes(model: ModelConfig, kv_dtype: str, owners: Iterable[int] | None = None) -> int:
    """Return the bytes of the scales, dynamic or of groups, of one token over ``owners`` (default: all)."""
    rows, chosen = model.kv_vectors * model.num_kv_heads, model.owners if owners is None else owners
    return sum(rows * scale_bytes(kv_dtype, model.head_dim_of(owner)) for owner in chosen)


def kv_bytes(model: ModelConfig, kv_dtype: str, owners: tuple[int, ...] | None = None) -> int:
    """Return the bytes one token keeps in the cache over ``owners`` (default: all): K, V and their scales."""
    return kv_element_bytes(model, kv_dtype, owners) + kv_scale_bytes(model, kv_dtype, owners)


def state_bytes(model: ModelConfig, dtype: str) -> int:
    """Return the bytes of one state of a sequence over all layers that keep one, computed in ``dtype``."""
    if model.linear is None:
        return 0
    numbers = [map(math.prod, model.state_shapes_of(layer)) for layer in model.linear_layers]
    return sum(conv * ELEMENT_BYTES[dtype] + sum(states) * ELEMENT_BYTES["float32"] for conv, *states in numbers)


def kv_bytes_below(model: ModelConfig, kv_dtype: str) -> int:
    """Return the bytes that every token keeps: those of all owners, or below a blind cut."""
    return kv_bytes(model, kv_dtype, model.written_below)


def kv_bytes_above(model: ModelConfig, kv_dtype: str) -> int:
    """Return the bytes that a token keeps besides which goes past a blind cut; 0 with any other cut."""
    return kv_bytes(model, kv_dtype, model.owners_above) if model.is_blind else 0


def sequence_kv_bytes(model: ModelConfig, kv_dtype: str, num_prompt_tokens: int, num_tokens: int) -> int:
    """Return the bytes that a sequence of ``num_tokens``, those of its prompt included, keeps of K and V."""
    visibility = visibility_of(model)
    seen = visibility.num_seen(num_prompt_tokens, num_tokens) if visibility else 0
    return num_tokens * kv_bytes_below(model, kv_dtype) + seen * kv_bytes_above(model, kv_dtype)


def keys_at(model: ModelConfig, context: float, num_prompt_tokens: float | None = None) -> list[float]:
    """Return the keys that a token sees in each layer where ``context`` are there: no more than its window, and above a
    blind cut what is seen there of a prompt of ``num_prompt_tokens`` (default: ``context``) and of what follows it."""
    keys = [min(context, window) if window else context for window in model.layer_windows]
    if (visibility := visibility_of(model)) is not None:
        prompt = context if num_prompt_tokens is None else num_prompt_tokens
        keys[model.cut :] = [visibility.num_seen(prompt, context)] * (model.num_layers - model.cut)
    return keys


def kv_read_bytes(model: ModelConfig, kv_dtype: str, context: float, num_prompt_tokens: float | None = None) -> float:
    """Return the bytes of cache that one decode token reads which attends ``context`` keys: every layer reads its
    owner's, as many keys as ``keys_at`` says. The floor of a step counts each owner once instead: ``context *
    kv_bytes``.
    """
    keys = keys_at(model, context, num_prompt_tokens)
    read = [0 if owner == NO_OWNER else model.cached_numbers_of(owner) for owner in model.owner_of_layer]
    return kv_bytes(model, kv_dtype) / cached_numbers(model) * sum(map(operator.mul, keys, read))
