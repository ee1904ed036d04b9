"""Optimisation profiles admit every step that the engine's limits allow, and nothing that TensorRT cannot hold."""

import itertools
from dataclasses import replace

import pytest

from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.tensorrt_profiles import MAX_ELEMENTS, PROFILES, input_ranges, size_ranges
from kvforge.kv_policies import parse
from kvforge.runtime.sessions.cuda_decode import batch_bucket, width_bucket

OPTIONS = ResolvedOptions("tensorrt", "bfloat16", "bfloat16", 8, 100, 1000, 32, 3)


def maxima(*arguments):
    return tuple(r.maximum for r in input_ranges(*arguments))


def test_step_inputs_at_their_limits():
    assert maxima("lower", "input_ids", (-1,), OPTIONS, "mixed") == (100,)
    assert maxima("lower", "input_ids", (-1,), OPTIONS, "decode") == (32,)
    assert maxima("lower", "query_start", (-1,), OPTIONS, "decode") == (9,)
    assert maxima("lower", "page_table", (-1, -1), OPTIONS, "mixed") == (8, 32)
    assert maxima("upper", "hidden", (-1, 64), OPTIONS, "mixed") == (100, 64)
    assert maxima("upper", "survivor_index", (-1,), OPTIONS, "mixed") == (32,)
    assert maxima("verify", "logits", (-1, 500), OPTIONS, "mixed") == (32, 500)
    assert maxima("verify", "draft_probs", (-1, 500), OPTIONS, "mixed") == (24, 500)


def test_padded_steps_of_generated_tokens_are_in_the_first_profile():
    """Every size that the session pads such a step to, whatever the limits."""
    for seqs, tokens, length in itertools.product((1, 3, 8, 100, 600), (1, 4, 30, 2048), (32, 5000)):
        options = ResolvedOptions("tensorrt", "bfloat16", "bfloat16", seqs, tokens, length, 16)
        sizes, most = size_ranges(options, "decode"), min(seqs, tokens)
        columns = -(-length // 16)
        for count in range(1, most + 1):
            batch = batch_bucket(count, most)
            if batch is not None:
                assert count <= batch <= min(sizes[name].maximum for name in ("tokens", "sequences", "survivors"))
        for width in range(1, columns + 1):
            assert width <= width_bucket(width, columns) <= sizes["columns"].maximum == sizes["state_columns"].maximum


def test_pools_of_kv_policies():
    options = ResolvedOptions("tensorrt", "bfloat16", "bfloat16", 8, 100, 1000, 32, policy=parse("snapkv"))
    assert maxima("upper", "mass_3", (-1, 32, 8), options, "mixed") == (8 * 32, 32, 8)
    assert maxima("lower", "state_table", (-1, -1), options, "decode") == (8, 32)
    assert maxima("lower", "observed", (-1,), options, "decode") == (8,)
    streams = replace(options, policy=parse("streaming"))
    assert maxima("lower", "sink_keys_0", (-1, 4, 8, 64), streams, "decode") == (8, 4, 8, 64)


def test_drafts_may_be_absent():
    assert input_ranges("verify", "draft_probs", (-1, 500), OPTIONS, "mixed")[0].minimum == 0


def test_no_more_sequences_than_tokens():
    few = ResolvedOptions("tensorrt", "bfloat16", "bfloat16", 8, 4, 1000, 32)
    assert maxima("lower", "kv_length", (-1,), few, "decode") == (4,)


def test_pools_end_where_a_tensor_does():
    shape = (-1, 32, 8, 128)
    assert maxima("lower", "k_pool_0", shape, OPTIONS, "mixed") == (8 * 32, 32, 8, 128)
    large = ResolvedOptions("tensorrt", "bfloat16", "fp8", 256, 8192, 131072, 32)
    pages = maxima("lower", "k_pool_0", shape, large, "mixed")[0]
    assert pages * 32 * 8 * 128 <= MAX_ELEMENTS < (pages + 1) * 32 * 8 * 128
    assert maxima("upper", "k_scales_0", (-1, 32, 8), OPTIONS, "decode") == (256, 32, 8)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("drafts", (0, 5))
def test_ranges_are_ranges(profile, drafts):
    options = ResolvedOptions("tensorrt", "bfloat16", "bfloat16", 8, 100, 1000, 32, drafts)
    for name, range_ in size_ranges(options, profile).items():
        assert 0 <= range_.minimum <= range_.optimum <= range_.maximum, name


@pytest.mark.parametrize("shape", ((-1, -1, 8, 128), (64, 32, 8, 128), (-1, 32, -1, 128)))
def test_other_dynamic_dimensions_are_refused(shape):
    with pytest.raises(ValueError, match="k_pool_0 has shape"):
        input_ranges("lower", "k_pool_0", shape, OPTIONS, "mixed")
