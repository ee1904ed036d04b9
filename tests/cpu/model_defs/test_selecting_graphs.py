"""Graphs that select chunks: with all chunks selected, at full rank, they compute what graphs without selection do."""

import pytest
import torch

from kvforge.compiler.options import BuildOptions
from model_defs import ModelConfig, load_config
from model_defs.rope import inverse_frequencies, rope_cos_sin
from tests.support.rounding import assert_near, model_error, relative_error, rounded_model_error
from tests.support.schedules.shadow_steps import TOKENS, mixed_steps
from tests.support.sessions.eager import EagerSession, random_session

HF = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_theta": 500.0,
}
SWIFTKV = {"swiftkv": True, "num_key_value_layers": 2, "key_value_group_size": 2}
MODELS = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 6},
    "llama_swiftkv": {"model_type": "llama_swiftkv", **SWIFTKV},
    "qwen2_swiftkv": {"model_type": "qwen2_swiftkv", **SWIFTKV, "num_key_value_layers": 1},
    "qwen3_swiftkv": {"model_type": "qwen3_swiftkv", **SWIFTKV, "num_key_value_heads": 3},
}


def config_of(name: str) -> ModelConfig:
    return load_config(HF | MODELS[name])


def session(config: ModelConfig, kv_policy: str, **options: object) -> EagerSession:
    return random_session(config, BuildOptions(page_size=16, max_num_seqs=4, kv_policy=kv_policy, **options))


@pytest.mark.parametrize("outliers", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_all_chunks_at_full_rank_are_exact_attention(name: str, outliers: int) -> None:
    config = config_of(name)
    rank = config.kv_dim
    factored = config.num_layers * (rank, rank)  # keys are products with an orthonormal basis and its transpose
    policy = f"shadowkv:rank={rank},chunk_size=4,sparse_budget=96,num_outlier_chunks={outliers},num_local_tokens=8"
    expected = mixed_steps(session(config, "full"))
    actual = mixed_steps(session(config, policy))
    for step, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_near(one, other, model_error(config, TOKENS, *factored), step)


def test_a_small_budget_is_not_exact_attention() -> None:
    config = config_of("llama_swiftkv")
    policy = "shadowkv:rank=8,chunk_size=4,sparse_budget=8,num_outlier_chunks=1,num_local_tokens=8"
    expected, actual = (mixed_steps(session(config, name)) for name in ("full", policy))
    rounding = model_error(config, TOKENS)
    is_equal = [relative_error(one, other) <= rounding for one, other in zip(actual, expected, strict=True)]
    assert is_equal == [True, True, False, False, False, False, False, False, False]
    assert all(one.isfinite().all() for one in actual)


def test_bfloat16_is_close_to_exact_attention() -> None:
    config = config_of("qwen3_swiftkv")
    policy = f"shadowkv:rank={config.kv_dim},chunk_size=8,sparse_budget=96,num_outlier_chunks=1,num_local_tokens=8"
    expected, actual = (mixed_steps(session(config, name, dtype="bfloat16")) for name in ("full", policy))
    for one, other in zip(actual, expected, strict=True):
        assert_near(one, other, rounded_model_error(config, torch.bfloat16))


def test_tables_hold_the_rotation_of_every_position() -> None:
    config = config_of("llama")
    tables = session(config, "shadowkv:rank=8", max_seq_len=200).rope_tables
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    for position in (0, 1, 57, 199):
        for table, expected in zip(tables, rope_cos_sin(torch.tensor([position]), frequencies), strict=True):
            assert table.shape == (200, 8) and table.dtype == torch.float32
            assert torch.equal(table[position], expected[0])
