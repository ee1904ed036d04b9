"""What ShadowKV keeps of a prompt, against the brute-force reference: any head dim, length, page order and dtype."""

import random

import pytest
import torch

from kvforge.kv_policies.shadowkv import ShadowKV, factor
from kvforge.kv_policies.shadowkv.factor import factor_prompt
from model_defs.rope import inverse_frequencies, rope_cos_sin
from model_defs.rope_config import RopeConfig
from tests.support.operators.shadowkv_reference import Parameters, ShadowCache, low_rank, rotate
from tests.support.rounding import assert_near, assert_within, low_rank_error, roundings_error, sum_error, unit_roundoff


def random_pool(policy, num_tokens, heads, dim, page_size, dtype, rng):
    """One owner's pools with a prompt on random pages; the compact cache is some of these pages in another order."""
    num_pages = -(-num_tokens // page_size) + 3
    pages = torch.tensor(rng.sample(range(num_pages), -(-num_tokens // page_size)))
    shadow_pages = torch.tensor(rng.sample(range(num_pages), len(pages)))
    compact_pages = torch.tensor(rng.sample(pages.tolist(), -(-policy.compact_length(num_tokens) // page_size)))
    paged, chunks = (num_pages, page_size, heads, dim), (num_pages, page_size // policy.chunk_size, heads)
    pool = (
        torch.randn(paged).to(dtype),
        torch.randn(paged).to(dtype),
        torch.full((num_pages, page_size, policy.rank), float("nan"), dtype=dtype),
        torch.full((*chunks, dim), float("nan"), dtype=dtype),
        torch.full(chunks, 9, dtype=torch.uint8),
        torch.full((3, heads, policy.rank, dim), float("nan"), dtype=dtype),
        torch.zeros(3, heads, policy.max_selected, dtype=torch.int32),
        torch.zeros(3, heads, 2, dtype=torch.int64),
        torch.full(paged, float("nan"), dtype=dtype),
    )
    return pool, pages, shadow_pages, compact_pages


@pytest.mark.parametrize("case", range(40))
def test_against_the_reference(case, monkeypatch):
    rng = random.Random(case)
    torch.manual_seed(case)
    heads, dim, chunk = rng.choice([1, 2, 3]), rng.choice([2, 6, 16, 20]), rng.choice([1, 2, 4, 8])
    page_size = chunk * rng.choice([1, 2, 3])
    policy = ShadowKV(
        rank=rng.randint(1, heads * dim),
        chunk_size=chunk,
        sparse_budget=chunk * rng.randint(1, 3),
        num_outlier_chunks=rng.choice([0, 1, 3]) if chunk > 1 else 0,  # all cosines of chunks of one key are 1
        num_local_tokens=rng.choice([0, 1, 11]),
    )
    num_tokens = (policy.num_outlier_chunks + policy.max_selected + 1) * chunk + policy.num_local_tokens
    num_tokens += rng.randint(0, 70)
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
    monkeypatch.setattr(factor, "BLOCK_TOKENS", rng.choice([1, 16, 2048]))
    pool, pages, shadow_pages, compact_pages = random_pool(policy, num_tokens, heads, dim, page_size, dtype, rng)
    k_pool, v_pool, u, landmarks, is_outlier, sv, cached, counts, host_v = pool
    rotated, values = (x[pages].flatten(0, 1)[:num_tokens].clone() for x in (k_pool, v_pool))
    before = k_pool.clone()
    frequencies = inverse_frequencies(RopeConfig(), dim)
    rope = rope_cos_sin(torch.arange(num_tokens + 5), frequencies)

    factor_prompt(policy, pool, num_tokens, pages, compact_pages, shadow_pages, 1, rope)

    positions = torch.arange(num_tokens)
    keys = rotate(rotated.double(), -positions, frequencies)
    parameters = Parameters(
        policy.rank, policy.sparse_budget, policy.num_outlier_chunks, chunk, policy.num_local_tokens
    )
    want = ShadowCache(keys, values, frequencies, parameters)
    left = u[shadow_pages].flatten(0, 1)[:num_tokens].double()
    right = sv[1].double().transpose(0, 1).flatten(1)
    # Each factor is rounded to its dtype: independent errors of the products that an element sums.
    rounded = roundings_error(2, dtype) * (left.square() @ right.square()).sqrt()
    bound = rounded + low_rank_error(keys.flatten(1), policy.rank)
    assert_within(left @ right, low_rank(keys.flatten(1), policy.rank), bound)
    assert sv[[0, 2]].isnan().all()
    assert (cached[1] == -1).all() and (cached[[0, 2]] == 0).all() and not counts.any()
    assert torch.equal(host_v[shadow_pages].flatten(0, 1)[:num_tokens], values)
    means = landmarks[shadow_pages].flatten(0, 1)[: want.num_chunks].double()
    assert_near(
        means, torch.stack([torch.stack(row) for row in want.landmarks], 1), sum_error(chunk) + unit_roundoff(dtype)
    )
    marks = is_outlier[shadow_pages].flatten(0, 1)[: want.num_chunks]
    assert [marks[:, head].nonzero().flatten().tolist() for head in range(heads)] == want.outliers
    start, length = policy.num_selected(num_tokens) * chunk, policy.compact_length(num_tokens)
    for pool_of, source in ((k_pool, rotated), (v_pool, values)):
        kept = pool_of[compact_pages].flatten(0, 1)[start:length]
        for head in range(heads):
            members = [t for m in want.outliers[head] for t in range(m * chunk, (m + 1) * chunk)]
            members += range(want.num_chunks * chunk, num_tokens)
            assert torch.equal(kept[:, head], source[members, head])
    others = [page for page in range(len(k_pool)) if page not in compact_pages.tolist()]
    assert torch.equal(k_pool[others], before[others])


def test_a_rank_above_the_keys_dimensions_adds_nothing():
    torch.manual_seed(0)
    policy = ShadowKV(rank=9, chunk_size=2, sparse_budget=2, num_outlier_chunks=1, num_local_tokens=1)
    rng = random.Random(0)
    pool, pages, shadow_pages, compact_pages = random_pool(policy, 30, 2, 4, 4, torch.float32, rng)
    rope = rope_cos_sin(torch.arange(30), inverse_frequencies(RopeConfig(), 4))
    keys = rotate(pool[0][pages].flatten(0, 1)[:30].double(), -torch.arange(30), inverse_frequencies(RopeConfig(), 4))
    factor_prompt(policy, pool, 30, pages, compact_pages, shadow_pages, 0, rope)
    left = pool[2][shadow_pages].flatten(0, 1)[:30]
    assert torch.equal(left[:, 8], torch.zeros(30)) and torch.equal(pool[5][0, :, 8], torch.zeros(2, 4))
    assert_within(left @ pool[5][0].transpose(0, 1).flatten(1), keys.flatten(1), low_rank_error(keys.flatten(1), 9))
