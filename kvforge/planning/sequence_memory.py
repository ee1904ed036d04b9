"""What a KV policy keeps and reads of one sequence, and how many sequences of it fit."""

from collections.abc import Sequence
from typing import Any

from kvforge.common.number_formats import KV_FORMATS
from kvforge.costs.cache import exact_bytes, owner_cache, state_bytes
from kvforge.costs.weights import weight_bytes
from kvforge.kv_policies import Full, KVPolicy, OwnerCache, of_cache
from kvforge.kv_policies.compatibility import check
from kvforge.kv_policies.features import (
    BLIND_CUT,
    DRAFT_HEAD,
    LATENT,
    LINEAR,
    PAGING,
    SLIDING_WINDOW,
    Asked,
    feature_of,
    feature_of_cache,
    named,
)
from kvforge.kv_policies.visibility import visibility_of
from kvforge.manifest import Manifest
from kvforge.planning.capacity import GIB, Machine
from kvforge.planning.plan import Fleet, PlannedWorkload, Variant
from model_defs import ModelConfig

CONTEXTS = tuple(2**power for power in range(10, 18))
"""Prompt tokens of the curves."""


def plan_policy(policy: KVPolicy, variants: Sequence[Variant], work: PlannedWorkload, fleet: Fleet) -> dict[str, Any]:
    """Return what a plan says of ``policy`` (docs/planning.md): of one sequence whose prompt of ``work.input_tokens``
    is computed, for each variant, and the sequences that fit each memory with their output.

    Raises:
        BuildError: the policy does not go with the model, its pages or a variant's cache format.
    """
    rows = [_row(policy, variant, variants[0], work) for variant in variants]
    plan: dict[str, Any] = {
        "name": policy.name,
        "parameters": policy.parameters,
        "page_size": work.page_size,
        "context": work.input_tokens,
        "variants": rows,
    }
    if fleet.memory_gib:
        plan["capacity"] = [
            {
                "memory_gib_per_gpu": memory,
                "variants": [_fit(policy, variant, work, fleet.machine(memory)) for variant in variants],
            }
            for memory in fleet.memory_gib
        ]
    return plan


def sequence_bytes(manifest: Manifest) -> dict[str, int]:
    """Return what a prompt of ``max_seq_len`` tokens keeps over all owners, as its state, and over the layers of an
    auxiliary model: on the device and in host memory with the engine's policy, and on the device in full."""
    cache, policy, length = manifest.owner_cache, manifest.policy, manifest.max_seq_len
    besides = cache.padded(length) * (manifest.auxiliary_bytes_per_token + manifest.draft_head_bytes_per_token)
    besides += manifest.state_bytes
    owners = len(manifest.model.written_below)
    if (visibility := visibility_of(manifest.model)) is not None:
        seen = visibility.num_seen(length, length)
        besides += len(manifest.model.owners_above) * policy.device_bytes(cache, seen)
    return {
        "sequence_device_bytes": owners * policy.device_bytes(cache, length) + besides,
        "sequence_host_bytes": owners * policy.host_tier.host_bytes(cache, length),
        "sequence_full_bytes": owners * of_cache(Full(), manifest.kv_dtype).device_bytes(cache, length) + besides,
    }


def sequences_that_fit(free_bytes: float, bytes_each: int, prefill_bytes: int) -> int:
    """Return how many sequences of ``bytes_each`` fit, of which one takes ``prefill_bytes`` more while its prompt is
    computed."""
    return max(int((free_bytes - prefill_bytes) // bytes_each), 0)


def _check(policy: KVPolicy, model: ModelConfig, kv_dtype: str, work: PlannedWorkload) -> None:
    cache = [feature_of_cache(kv_dtype)] if KV_FORMATS[kv_dtype].element_bits < 16 else []
    asked = Asked(model, policy, kv_dtype, kv_dtype, has_draft_head=work.head is not None)
    known = (DRAFT_HEAD, BLIND_CUT, SLIDING_WINDOW, LATENT, LINEAR)
    there = [named(feature, asked) for feature in known if feature.is_there(asked)]
    check([feature_of(policy), PAGING, *cache, *there])
    for one in (policy, of_cache(policy, kv_dtype)):
        one.check(model.num_kv_heads, model.head_dim, work.page_size)


def _besides(model: ModelConfig, cache: OwnerCache, work: PlannedWorkload, length: int) -> int:
    """Return the bytes that a sequence of ``length`` tokens keeps with any policy: its state, and what a draft head
    keeps of its tokens."""
    of_head = work.head_costs(model)["kv_bytes_per_token"]
    return state_bytes(model, work.wide_dtype) + cache.padded(length) * of_head


def _row(policy: KVPolicy, variant: Variant, plain: Variant, work: PlannedWorkload) -> dict[str, Any]:
    model, tokens = variant.model, work.input_tokens
    _check(policy, model, variant.kv_dtype, work)
    cache, layers = _cache(variant, work), model.num_layers - len(model.linear_layers)
    policy, in_full = of_cache(policy, variant.kv_dtype), of_cache(Full(), variant.kv_dtype)
    besides = _besides(model, cache, work, tokens)
    device = model.num_owners * policy.device_bytes(cache, tokens) + besides
    full = model.num_owners * in_full.device_bytes(cache, tokens) + besides
    plain_full = plain.model.num_owners * of_cache(Full(), plain.kv_dtype).device_bytes(_cache(plain, work), tokens)
    plain_full += _besides(plain.model, cache, work, tokens)
    return {
        "name": variant.name,
        "device_bytes": device,
        "host_bytes": model.num_owners * policy.host_tier.host_bytes(cache, tokens),
        "full_bytes": full,
        "times_smaller": full / device,
        "times_smaller_than_first_in_full": plain_full / device,
        "prefill_bytes": model.num_owners * policy.prefill_bytes(cache, tokens),
        "step_device_bytes_read": layers * policy.device_bytes_read(cache, tokens),
        "step_host_bytes_read": layers * policy.host_tier.host_bytes_read(cache, tokens),
        "step_full_bytes_read": layers * in_full.device_bytes_read(cache, tokens),
        "by_context": {
            str(length): {
                "device_bytes": model.num_owners * policy.device_bytes(cache, length) + besides,
                "full_bytes": model.num_owners * in_full.device_bytes(cache, length) + besides,
            }
            for length in CONTEXTS
            if length <= model.max_position
            for besides in (_besides(model, cache, work, length),)
        },
    }


def _fit(policy: KVPolicy, variant: Variant, work: PlannedWorkload, machine: Machine) -> dict[str, Any]:
    model, cache, kv_dtype = variant.model, _cache(variant, work), variant.kv_dtype
    policy, in_full = of_cache(policy, kv_dtype), of_cache(Full(), kv_dtype)
    free = machine.memory_bytes - machine.reserve_bytes - weight_bytes(model, work.weight_dtype)
    free -= work.bytes_beside(model)
    free -= exact_bytes(model, kv_dtype, work.page_size, work.exact_bits, 0, work.step_tokens)
    lengths = work.input_tokens, work.output_tokens
    besides = _besides(model, cache, work, sum(lengths))
    each = model.num_owners * policy.device_bytes(cache, *lengths) + besides
    full = model.num_owners * in_full.device_bytes(cache, *lengths) + besides
    prefill = model.num_owners * policy.prefill_bytes(cache, work.input_tokens)
    sequences = sequences_that_fit(free, each, prefill)
    host = sequences * model.num_owners * policy.host_tier.host_bytes(cache, *lengths)
    return {
        "name": variant.name,
        "sequences": sequences,
        "sequences_in_full": sequences_that_fit(free, full, 0),
        "host_gib": host / GIB,
    }


def _cache(variant: Variant, work: PlannedWorkload) -> OwnerCache:
    return owner_cache(variant.model, variant.kv_dtype, work.page_size, work.exact_bits)
