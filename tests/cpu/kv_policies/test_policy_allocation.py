"""What is allocated for factored prompts is what the policy's formulas say."""

import random

import pytest

from kvforge.kv_policies import Full
from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.planning.sequence_memory import sequences_that_fit
from kvforge.runtime.cache_capacity import cache_shape
from kvforge.runtime.sessions.pools import allocate_pools, device_bytes, host_bytes
from tests.support.sessions.fake import fake_manifest


def shape(policy, heads, dim, page_size, dtype="bfloat16"):
    """A manifest of two owners."""
    return fake_manifest(
        dtype=dtype, kv_dtype=dtype, num_heads=heads, num_kv_heads=heads, head_dim=dim, page_size=page_size,
        kv_policy=policy.name, kv_policy_parameters=policy.parameters,
    )  # fmt: skip


def allocated(manifest, lengths, num_generated=0):
    """Pools for exactly these prompts, with slots for those that are factored."""
    policy, size = manifest.policy, manifest.page_size
    kept = [policy.compact_length(length) + num_generated for length in lengths]
    shadow_pages = sum(policy.keeping.num_state_pages(length, size) for length in lengths)
    num_slots = sum(map(policy.is_factored, lengths))
    pools = allocate_pools(manifest, sum(-(-length // size) for length in kept), "cpu", shadow_pages, num_slots)
    return device_bytes(manifest, pools), host_bytes(manifest, pools)


@pytest.mark.parametrize("seed", range(20))
def test_allocation_is_the_formula(seed: int) -> None:
    rng = random.Random(seed)
    heads, dim, chunk = rng.choice([1, 2, 3, 8]), rng.choice([2, 8, 10]), rng.choice([1, 4, 8])
    policy = ShadowKV(
        rank=rng.randint(1, heads * dim),
        chunk_size=chunk,
        sparse_budget=chunk * rng.randint(1, 6),
        num_outlier_chunks=rng.randint(0, 4),
        num_local_tokens=rng.randint(0, 20),
    )
    manifest = shape(policy, heads, dim, chunk * rng.randint(1, 4), rng.choice(["bfloat16", "float32"]))
    least = (policy.max_selected + policy.num_outlier_chunks + 1) * chunk + policy.num_local_tokens
    lengths = [least] + [rng.randint(1, 6 * least) for _ in range(4)]
    assert policy.is_factored(least) and not policy.is_factored(least - 1)
    generated, cache = rng.randint(0, 40), manifest.owner_cache
    device, host = allocated(manifest, lengths, generated)
    assert device == 2 * sum(policy.device_bytes(cache, length, generated) for length in lengths)
    assert host == 2 * sum(policy.host_tier.host_bytes(cache, length, generated) for length in lengths)


@pytest.mark.parametrize("num_seqs", [1, 2, 5, 9])
def test_what_the_plan_says_fits_does_in_the_runtime(num_seqs: int) -> None:
    """The least memory for which the plan counts so many long prompts gives the runtime the pages that they need."""
    policy, tokens = ShadowKV(rank=20, sparse_budget=256, num_outlier_chunks=6), 4096
    manifest = shape(policy, heads=8, dim=16, page_size=32)
    cache = manifest.owner_cache
    each, prefill = 2 * policy.device_bytes(cache, tokens), 2 * policy.prefill_bytes(cache, tokens)
    memory = num_seqs * each + prefill
    assert sequences_that_fit(memory, each, prefill) == num_seqs == sequences_that_fit(memory - 1, each, prefill) + 1
    num_pages, num_state_pages = cache_shape(manifest, num_seqs, tokens).divide(memory)
    compact = cache.padded(policy.compact_length(tokens)) // 32
    assert num_state_pages == num_seqs * tokens // 32
    assert num_pages == (num_seqs - 1) * compact + tokens // 32


def test_six_times_less_as_allocated() -> None:
    """The shape of Llama-3.1-8B at 124928 tokens with heads, rank, prompt and budget an eighth as large."""
    policy = ShadowKV(rank=20, sparse_budget=256, num_outlier_chunks=6)
    manifest = shape(policy, heads=8, dim=16, page_size=32)
    device, host = allocated(manifest, [124928 // 8])
    plain = shape(Full(), heads=8, dim=16, page_size=32)
    full = device_bytes(plain, allocate_pools(plain, 124928 // 8 // 32))
    assert full == 2 * Full().device_bytes(plain.owner_cache, 124928 // 8) == 2 * host
    assert full / device > 6
