"""What a prompt's chunks may change, in fp32: sums of another order round otherwise, and an 8-bit cache makes a step of
a rounding that falls on the other side of a boundary. Nothing else."""

import random

import pytest
import torch
from torch import Tensor

from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.kv_policies.shadowkv.factor import factor_prompt
from model_defs.rope import inverse_frequencies, rope_cos_sin
from model_defs.rope_config import RopeConfig
from tests.support.models.small_models import small_session
from tests.support.random_cases import Seeds
from tests.support.rounding import assert_near, codes_apart, model_error, relative_error, sum_error
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.eager import EagerSession

pytestmark = pytest.mark.usefixtures("one_thread")


def cached(driver: StepDriver) -> list[Tensor]:
    """Return every pool's rows ``[tokens, …]`` of the driver's sequence, in the order of its positions."""
    size = driver.session.manifest.page_size
    pages = driver.pages[: -(-driver.length // size)]
    return [tensor[pages].flatten(0, 1)[: driver.length] for pool in driver.pools for tensor in pool]


def in_chunks(session: EagerSession, tokens: list[int], rng: random.Random | None, seed: int) -> StepDriver:
    """Compute a prompt in one step, or in chunks of 1 to 16 tokens."""
    driver, at = StepDriver(session, seed=seed), 0
    while at < len(tokens):
        size = len(tokens) if rng is None else rng.randint(1, 16)
        driver.run(tokens[at : at + size])
        at += size
    return driver


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8"])
def test_chunks_change_the_cache_by_rounding_alone(kv_dtype: str, seeds: Seeds) -> None:
    """What a chunk writes is near what the whole prompt writes: floats by rounding, codes by one at most where no code
    before them differs. The next token has near logits where no code differs, and the same bits where the cache is."""
    session = small_session({"kv_dtype": kv_dtype})
    flipped = num_near = 0
    cases = seeds(40, 400)
    for seed in cases:
        rng = random.Random(seed)
        tokens = [rng.randrange(3, 96) for _ in range(rng.randint(20, 60))]
        whole, chunked = in_chunks(session, tokens, None, seed), in_chunks(session, tokens, rng, seed)
        equal = True
        for one, other in zip(cached(whole), cached(chunked), strict=True):
            if one.dtype == torch.float32:
                assert not equal or relative_error(one, other) <= model_error(session.config, len(tokens))
                continue
            off = codes_apart(one, other)
            assert off.max() <= 1 or not equal, "a code is off by more than rounding does"
            equal = equal and bool((off == 0).all())
        flipped += not equal
        expected, found = whole.run([5]), chunked.run([5])
        own = zip(cached(whole), cached(chunked), strict=True)  # the new token's codes may differ as others' do
        if equal and all(torch.equal(one, other) for one, other in own if one.dtype != torch.float32):
            num_near += 1
            assert_near(found, expected, model_error(session.config, len(tokens)))
        for pool, source in zip(chunked.pools, whole.pools, strict=True):
            for tensor, content in zip(pool, source, strict=True):
                tensor.copy_(content)
        assert torch.equal(chunked.run([7]), whole.run([7]))  # the cache is all that a sequence carries along
    assert flipped == 0 if kv_dtype == "float32" else flipped * 4 < len(cases)
    assert num_near * 2 >= len(cases)
    print(f"{kv_dtype}: a code differs in {flipped} of {len(cases)} sequences")


def test_shadowkv_keeps_other_chunks_only_where_similarities_tie() -> None:
    """Keys that differ by rounding have the same outliers, unless the last outlier and the next chunk are alike to
    rounding: a choice has a boundary, as a code has. A tie that is made shows that one is enough."""
    policy = ShadowKV(rank=8, chunk_size=2, sparse_budget=8, num_outlier_chunks=2, num_local_tokens=4)
    generator = torch.Generator().manual_seed(0)
    rope = rope_cos_sin(torch.arange(64), inverse_frequencies(RopeConfig(), 16))
    flips = 0
    for case in range(60):
        keys = torch.randn(13, 4, 2, 16, generator=generator)
        if case % 10 == 0:
            keys[5] = keys[3]  # chunks on these pages tie, and one of them is an outlier where it is the likeliest
            keys[3, :2] = torch.stack((keys[3, 0], -0.99 * keys[3, 0]))
            keys[5, :2] = keys[3, :2]
            keys[7, :2] = torch.stack((keys[7, 0], -0.9999 * keys[7, 0]))
        near = keys * (1 + torch.finfo(torch.float32).eps * torch.randn(keys.shape, generator=generator))
        found = [outliers(policy, x, rope) for x in (keys, near)]
        if not torch.equal(*(marks for marks, _ in found)):
            flips += 1
            ordered = found[0][1].sort(dim=0).values
            # A cosine: a mean of 2 keys, three sums of 16 products, and 3 deviations of what was added.
            assert (ordered[2] - ordered[1]).abs().min() < 2 * sum_error(2, 16, 16, 16, 3)
    assert 0 < flips < 10


def outliers(policy: ShadowKV, keys: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Factor the rotated keys ``[pages, page_size, heads, head_dim]`` of a prompt; returns the chunks' marks and the
    similarities they were chosen by, each ``[chunks, heads]``."""
    pages, size, heads, dim = keys.shape
    tokens, chunks = pages * size, (pages, size // policy.chunk_size, heads)
    pool = (
        *(keys.clone(), keys.clone(), torch.zeros(pages, size, policy.rank), torch.zeros(*chunks, dim)),
        *(torch.zeros(chunks, dtype=torch.uint8), torch.zeros(1, heads, policy.rank, dim)),
        torch.zeros(1, heads, policy.max_selected, dtype=torch.int32),
        *(torch.zeros(1, heads, 2, dtype=torch.int64), torch.zeros_like(keys)),
    )
    order = torch.arange(pages)
    factor_prompt(policy, pool, tokens, order, order, order, 0, rope)
    count = policy.num_chunks(tokens)
    members = keys.flatten(0, 1)[: count * policy.chunk_size].unflatten(0, (count, policy.chunk_size))
    means = members.mean(dim=1, keepdim=True)
    return pool[4].flatten(0, 1)[:count], torch.cosine_similarity(members, means, dim=-1).amin(dim=1)
