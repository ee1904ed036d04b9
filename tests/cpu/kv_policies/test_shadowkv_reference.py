"""The brute-force reference of ShadowKV itself: exact where nothing is left out, and small cases by hand."""

import json

import pytest
import torch

from model_defs import load_config
from model_defs.reference import reference_logits
from model_defs.rope import inverse_frequencies
from model_defs.rope_config import RopeConfig
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.operators.shadowkv_reference import (
    Parameters,
    ShadowCache,
    ShadowModel,
    exact_attention,
    low_rank,
    rotate,
)
from tests.support.rounding import assert_near, model_error, relative_error, sum_error


def test_full_rank_and_budget_are_exact_attention():
    torch.manual_seed(0)
    frequencies = inverse_frequencies(RopeConfig(), 16)
    for length, heads, kv_heads in ((40, 4, 2), (101, 3, 3), (75, 4, 1)):
        keys, values = torch.randn(2, length + 5, kv_heads, 16)
        q = rotate(torch.randn(length + 5, heads, 16), torch.arange(length + 5), frequencies)
        parameters = Parameters(rank=kv_heads * 16, sparse_budget=104, num_outlier_chunks=2)
        cache = ShadowCache(keys[:length], values[:length], frequencies, parameters)
        want = exact_attention(q, rotate(keys, torch.arange(length + 5), frequencies), values)
        for position in range(length, length + 5):
            cache.append(keys[position], values[position])
            assert_near(cache.attend(q[position]), want[position], 2 * sum_error(48, 16, 106, 106, dtype=torch.float64))


def test_landmarks_outliers_and_selection_by_hand():
    """Six chunks of two keys, not rotated at frequency 0: the third one's keys oppose each other, so it is the outlier;
    the query's best two of the others are known."""
    along = torch.tensor([[4.0, 0.0], [3.0, 0.0], [0.0, 1.0], [1.0, 0.0], [2.0, 0.0], [5.0, 0.0]])
    keys = along.repeat_interleave(2, dim=0)
    keys[5] *= -0.5
    keys = keys[:, None]
    parameters = Parameters(1, sparse_budget=4, num_outlier_chunks=1, chunk_size=2, num_local_tokens=0)
    cache = ShadowCache(keys, torch.zeros(12, 1, 2), torch.zeros(1), parameters)
    assert cache.num_chunks == 6 and cache.outliers == [[2]]
    assert cache.select(torch.tensor([[1.0, 0.0]]), 0) == [0, 5]
    assert cache.select(torch.tensor([[-1.0, 0.0]]), 0) == [3, 4]
    assert cache.select(torch.tensor([[0.0, 1.0]]), 0) == [0, 1]  # all alike: the lower ones
    assert cache.select(torch.tensor([[0.5, 0.0], [-8.0, 0.0]]), 0) == [3, 5]  # each query of the group brings one
    assert not parameters.approximates(6) and parameters.approximates(8)


def test_low_rank_is_the_best_of_its_rank():
    x = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    assert_near(low_rank(x, 2), torch.diag(torch.tensor([3.0, 2.0, 0.0])), sum_error(3, 3, dtype=torch.float64))


@pytest.mark.parametrize(("family", "cut"), [("llama", 2), ("qwen3", 2), ("llama", None)])
def test_the_model_without_omissions_is_the_exact_model(tmp_path, family, cut):
    checkpoint = make_checkpoint(tmp_path, family, cut=cut, group_size=2, num_hidden_layers=5)
    config, weights = load_config(json.loads((checkpoint / "config.json").read_text())), load_weights(checkpoint)
    tokens = torch.randint(3, 320, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    model = ShadowModel(config, weights, Parameters(rank=32, sparse_budget=512, num_outlier_chunks=0))
    got = model.logits(tokens[:60], tokens[60:])
    want = reference_logits(config, weights, torch.tensor(tokens))[59:]
    rounding = model_error(config, len(tokens))
    assert_near(got, want, rounding)
    assert not model.parameters.approximates(60)
    narrow = ShadowModel(config, weights, Parameters(rank=8, sparse_budget=8, num_outlier_chunks=1))
    sparse = narrow.logits(tokens[:60], tokens[60:])
    assert_near(sparse[0], want[0], rounding)  # the prefill is exact
    assert relative_error(sparse[1], want[1]) > 10 * rounding
