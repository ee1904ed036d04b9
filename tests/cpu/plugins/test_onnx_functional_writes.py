"""The cache write without effects, which ONNX graphs are traced from."""

import torch

import plugins
from plugins.cases import FLOAT, CacheFormat
from plugins.registration import functional_writes, writes_are_functional
from plugins.rope_paged_kv_write.cases import random_case as rope_paged_kv_write_case


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_functional_writes_return_what_the_others_write() -> None:
    for seed in range(20):
        *tokens, k_pool, v_pool, k_scales, v_scales, k_scale, v_scale = rope_paged_kv_write_case(seed)
        pools = [pool for pool in (k_pool, v_pool, k_scales, v_scales) if pool is not None]
        before, want = ([pool.clone() for pool in pools] for _ in range(2))
        plugins.rope_paged_kv_write(*tokens, *want, k_scale=k_scale, v_scale=v_scale)
        with functional_writes():
            got = plugins.rope_paged_kv_write(*tokens, *pools, k_scale=k_scale, v_scale=v_scale)
        assert not writes_are_functional()
        for new, written, given, old in zip(got, want, pools, before, strict=True):
            assert new.data_ptr() != given.data_ptr()
            assert torch.equal(bits(new), bits(written)) and torch.equal(bits(given), bits(old)), seed


def test_opcheck() -> None:
    formats = (FLOAT, CacheFormat(torch.int8, dynamic=True), CacheFormat(torch.int8))
    seeds = [s for s in range(20) if len(rope_paged_kv_write_case(s)[0])]  # opcheck cannot clone an empty argument
    for cache in formats:
        case = rope_paged_kv_write_case(seeds[0], dtypes=(torch.float32,), formats=(cache,))
        *tokens, k_pool, v_pool, k_scales, v_scales, k_scale, v_scale = case
        pools = [torch.zeros_like(pool) for pool in (k_pool, v_pool, k_scales, v_scales) if pool is not None]
        if cache.dynamic:
            operator, scales = torch.ops.kvforge.rope_paged_kv_write_dynamic_functional.default, ()
        else:
            operator, scales = torch.ops.kvforge.rope_paged_kv_write_functional.default, (k_scale, v_scale)
        torch.library.opcheck(operator, (*tokens, *pools, *scales))  # zeros, since to opcheck NaN is not NaN
