"""Whether what an engine's manifest says can be true of an engine."""

import dataclasses
import math
import re
from typing import Any, get_args, get_origin

from kvforge.common.errors import KvforgeError
from kvforge.common.number_formats import ELEMENT_BYTES, KV_FORMATS, WEIGHT_BYTES
from kvforge.common.relative_names import is_inside
from kvforge.manifest.manifest import AUXILIARY_SIZES, Manifest

MAX_SIZE = 2**31 - 1
"""Of any of an engine's sizes: graphs and tables count in 32 bits."""
_CAPABILITY = re.compile(r"[1-9]\d?\.\d")


def is_possible(manifest: Manifest) -> bool:
    """Whether every field has its type, and the values can belong to one engine."""
    fields = dataclasses.fields(manifest)
    return all(_has_type(getattr(manifest, field.name), field.type) for field in fields) and _fits(manifest)


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a Manifest field's type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is dict:
        return isinstance(value, dict) and all(_has_type(item, arguments[1]) for item in value.values())
    if origin is tuple and arguments[1] is Ellipsis:
        return isinstance(value, tuple) and all(_has_type(item, arguments[0]) for item in value)
    if origin is tuple:
        return (
            isinstance(value, tuple)
            and len(value) == len(arguments)
            and all(_has_type(item, element) for item, element in zip(value, arguments, strict=True))
        )
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):  # no text: half a character
        return False
    return isinstance(value, kind) and (bool in (kind, *arguments) or not isinstance(value, bool))


def _fits(manifest: Manifest) -> bool:
    """Whether the numbers of a manifest can belong to an engine."""
    sizes = (
        "num_layers",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "page_size",
        "max_num_seqs",
        "max_num_tokens",
        "max_seq_len",
    )
    layers = manifest.num_layers
    return (
        all(1 <= getattr(manifest, name) <= MAX_SIZE for name in sizes)
        and 1 <= manifest.cut <= layers
        and (manifest.cut < layers or not manifest.early_exit)
        and len(manifest.layer_windows) == len(manifest.owner_of_layer) == layers
        and _fit_layers(manifest)
        and all(0 <= owner < layers for owner in manifest.owner_of_layer)
        and len(manifest.isa) >= 1
        and manifest.dtype in ELEMENT_BYTES
        and manifest.weight_dtype in WEIGHT_BYTES
        and 0 <= manifest.max_draft_len <= MAX_SIZE
        and manifest.kv_dtype in KV_FORMATS
        and len(manifest.kv_scales) == (manifest.num_owners if manifest.kv_format.scales == "static" else 0)
        and all(0 < scale < math.inf for scales in manifest.kv_scales for scale in scales)
        and all(0 <= token < manifest.vocab_size for tokens in _token_lists(manifest) for token in tokens)
        and all(map(is_inside, manifest.files))
        and all(map(_CAPABILITY.fullmatch, manifest.plan_capabilities))
        and _fit_experts(manifest)
        and _fits_latent(manifest)
        and _fits_auxiliary(manifest)
        and _has_policy(manifest)
    )


def _fits_auxiliary(manifest: Manifest) -> bool:
    """Whether there is no auxiliary model, or all of its sizes are there and the engine can have one."""
    sizes = manifest.auxiliary_model
    if not sizes:
        return True
    is_plain = manifest.cut == manifest.num_layers and manifest.kv_policy == "full" and not manifest.max_draft_len
    return is_plain and set(sizes) == set(AUXILIARY_SIZES) and all(1 <= size <= MAX_SIZE for size in sizes.values())


def _fit_experts(manifest: Manifest) -> bool:
    """Whether there are no experts, or all that is said of them belongs together."""
    sizes = (manifest.num_experts, manifest.num_active_experts, manifest.expert_intermediate_size)
    if sizes == (None, None, None):
        return manifest.dense_layers == () and manifest.num_shared_experts is None
    layers, known = manifest.dense_layers, [size for size in sizes if size is not None and 1 <= size <= MAX_SIZE]
    fits_layers = all(0 <= layer < manifest.num_layers for layer in layers) and len(set(layers)) == len(layers)
    fits_shared = 1 <= (manifest.num_shared_experts or 1) <= MAX_SIZE
    return len(known) == len(sizes) and known[1] <= known[0] and fits_layers and fits_shared


def _fits_latent(manifest: Manifest) -> bool:
    """Whether there is no latent attention, or its sizes are all there and those of the cache."""
    sizes = (manifest.latent_rank, manifest.latent_rope_dim, manifest.latent_nope_dim, manifest.latent_value_dim)
    if sizes == (None,) * len(sizes):
        return manifest.query_rank is None
    known = [size for size in (*sizes, manifest.query_rank or 1) if size is not None and 1 <= size <= MAX_SIZE]
    return len(known) == len(sizes) + 1 and known[0] + known[1] == manifest.head_dim and manifest.num_kv_heads == 1


def _fit_layers(manifest: Manifest) -> bool:
    """Whether sizes that differ from layer to layer are there for all layers, or for none."""
    each = (manifest.layer_head_dims, manifest.layer_intermediate_sizes)
    are_whole = all(len(sizes) in (0, manifest.num_layers) for sizes in each)
    known = (*manifest.layer_head_dims, *manifest.layer_intermediate_sizes, manifest.per_layer_input or 1)
    return are_whole and all(1 <= size <= MAX_SIZE for size in known)


def _token_lists(manifest: Manifest) -> tuple[tuple[int, ...], ...]:
    return manifest.special_tokens, manifest.punctuation_tokens, *manifest.policy_texts


def _has_policy(manifest: Manifest) -> bool:
    """Whether the policy is one, with all its parameters in range and for such heads and pages."""
    try:
        manifest.policy.check(manifest.num_kv_heads, manifest.head_dim, manifest.page_size)
        has_texts = len(manifest.policy_texts) == len(manifest.policy.texts)
        return has_texts and manifest.policy.parameters == manifest.kv_policy_parameters
    except KvforgeError:
        return False
