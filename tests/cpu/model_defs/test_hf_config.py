"""What a config.json means: absent fields as in transformers, and one sentence for what cannot be read."""

import dataclasses
import math
from typing import Any

import pytest

from kvforge.planning.presets import PRESETS
from model_defs import ModelError, RopeConfig, load_config
from model_defs.rope import inverse_frequencies
from tests.support.models.checkpoints import ALL_FAMILIES, own_fields

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 32,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_absent_fields_take_the_defaults_of_the_family(family: str) -> None:
    """A config.json with the bare sizes is the same model as one with everything transformers fills in."""
    bare = {**BASE, **own_fields(family, BASE), "hidden_size": 256}  # of heads so large that a half of one rotates
    complete = ALL_FAMILIES[family][0](**bare).to_dict()
    assert load_config({**bare, "model_type": family}) == load_config({**complete, "model_type": family})


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows_take_their_defaults(family: str) -> None:
    """``use_sliding_window`` alone: 4096 tokens from layer 28 on."""
    given = {**BASE, "use_sliding_window": True}
    expected = ALL_FAMILIES[family][0](**given)
    config = load_config({**given, "model_type": family})
    assert config.layer_windows == (0,) * 28 + (4096,) * 4
    assert [bool(window) for window in config.layer_windows] == [
        kind == "sliding_attention" for kind in expected.layer_types
    ]


def test_a_null_window_is_no_window() -> None:
    assert set(load_config({**BASE, "model_type": "mistral", "sliding_window": None}).layer_windows) == {0}
    assert set(load_config({**BASE, "model_type": "mistral"}).layer_windows) == {4096}


def test_eos_ids_of_the_generation_config_end_a_text_too() -> None:
    """Chat models name their end of turn in generation_config.json only."""
    hf = {**BASE, "model_type": "llama", "eos_token_id": 5}
    assert load_config(hf).eos_token_ids == (5,)
    assert load_config(hf, {"eos_token_id": [7, 5]}).eos_token_ids == (5, 7)
    assert load_config(hf, {"temperature": 0.6}).eos_token_ids == (5,)
    assert load_config({**hf, "eos_token_id": -1}, {"eos_token_id": None}).eos_token_ids == ()


def test_llama3_scaling_without_its_original_length_was_trained_at_the_full_one() -> None:
    rope = load_config({**BASE, "model_type": "llama", "rope_scaling": LLAMA3}).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 8.0, 8192)
    scaled = {**LLAMA3, "original_max_position_embeddings": 1024}
    assert load_config({**BASE, "model_type": "llama", "rope_parameters": scaled}).rope == dataclasses.replace(
        rope, original_max_position=1024
    )


def test_the_old_spelling_of_the_scaling_type() -> None:
    rope = load_config({**BASE, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}).rope
    assert (rope.kind, rope.factor) == ("linear", 2.0)


def test_yarn_extends_the_positions() -> None:
    """As vLLM and the models' own pages mean it, whether max_position_embeddings says so already or not."""
    for positions, expected in ((8192, 32768), (40960, 40960), (1024, 32768)):
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
        hf = {**BASE, "model_type": "qwen2", "rope_scaling": scaling, "max_position_embeddings": positions}
        assert load_config(hf).max_position == expected
    scaling["factor"] = None
    config = load_config({**BASE, "model_type": "llama", "rope_scaling": scaling, "max_position_embeddings": 32768})
    assert (config.rope.factor, config.max_position) == (4.0, 32768)


def test_longrope_has_factors_for_each_length() -> None:
    """The lengths of both lists are those of a head's pairs; beyond the original context the long ones hold."""
    factors = {"short_factor": [1.0], "long_factor": [4.0]}
    hf = {**BASE, "model_type": "llama", "rope_scaling": {"type": "longrope", **factors}}
    config = load_config({**hf, "head_dim": 2, "original_max_position_embeddings": 512})
    assert config.rope.amplitude == pytest.approx(math.sqrt(1 + math.log(16) / math.log(512)))
    assert config.rope.is_long and not config.for_length(512).rope.is_long and config.for_length(513) == config
    assert inverse_frequencies(config.rope, 2) * 4 == inverse_frequencies(config.for_length(512).rope, 2) == 1


def test_yi_is_the_planners_preset() -> None:
    """What config.json of Yi-1.5-9B says is a Llama."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 48, "vocab_size": 64000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 4096, "rope_theta": 5e6}
    hf = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads, "rms_norm_eps": 1e-6}
    config = load_config(hf)
    others = {"model_type": "yi-1.5-9b", "rope": RopeConfig(), "bos_token_id": None, "eos_token_ids": ()}
    assert dataclasses.replace(config, **others) == PRESETS["yi-1.5-9b"].model
    assert config.rope.theta == 5e6


def test_kinds_of_layers_rotate_by_themselves() -> None:
    """Both spellings; the scaling is that of layers without a window, which is every sixth unless told."""
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {"model_type": "gemma3_text", "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": linear}
    new = {
        "full_attention": {**linear, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    config = load_config({**BASE, **old, "sliding_window": 512})
    assert config == load_config({**BASE, "model_type": "gemma3_text", "rope_parameters": new, "sliding_window": 512})
    assert config.layer_windows == ((512,) * 5 + (0,)) * 5 + (512,) * 2
    assert [(rope.theta, rope.factor) for rope, _ in config.rotations] == [(2e4, 1.0), (5e5, 8.0)]
    assert load_config({**BASE, **old, "sliding_window_pattern": 2}).layer_windows == (4096, 0) * 16


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_what_phi3_calls_longrope(kind: str) -> None:
    """The names of its first checkpoints. Its own original context is 4096; half a head's pairs rotate."""
    factors = {"short_factor": [1.0], "long_factor": [4.0]}
    hf = {**BASE, "model_type": "phi3", "head_dim": 4, "partial_rotary_factor": 0.5, "sliding_window": 8192}
    config = load_config({**hf, "rope_scaling": {"type": kind, **factors}})
    assert (config.rope.kind, config.rope.original_max_position) == ("longrope", 4096)
    assert inverse_frequencies(config.rope, 4).tolist() == [0.25, 0.0]
    assert set(config.layer_windows) == {0}  # nothing is outside of it
    assert set(load_config({**hf, "sliding_window": 8191}).layer_windows) == {8191}


YARN = {"rope_type": "yarn", "factor": 4.0}
GEMMA = {"model_type": "gemma3_text"}
GRANITE4 = {"model_type": "granitemoehybrid", "num_local_experts": 0, "layer_types": ["attention"] * 32}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({**GRANITE4, "position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "needs factor"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": "linear"}, "one object of numbers"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "one object of numbers"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor is 'x' in config.json"),
        ({"rope_scaling": {"type": "yarn"}}, "needs factor"),
        ({"rope_scaling": {**YARN, "factor": 1e7}}, "factor is 10000000.0"),
        ({"rope_scaling": {**YARN, "factor": 1e6}}, "max_position_embeddings is 8192000000"),
        ({"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor is 0"),
        ({"rope_scaling": {**YARN, "beta_fast": "x"}}, "beta_fast is 'x'"),
        ({"rope_scaling": {**YARN, "mscale": "x", "mscale_all_dim": 1}}, "mscale is 'x'"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate is 1"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta above 1"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": "4k"}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "longrope"}}, "needs short_factor"),
        ({"rope_scaling": {**LONGROPE, "long_factor": 2.0}}, "long_factor is 2.0 in config.json; it must be a list"),
        (
            {"rope_scaling": {**LONGROPE, "short_factor": [1, 2]}},
            "has 2 numbers as its short_factor; 2 rotated elements",
        ),
        ({"rope_scaling": {**LONGROPE, "short_factor": [0]}}, "short_factor is 0 in config.json"),
        ({"rope_scaling": {**LONGROPE, "long_mscale": 1.2}}, "long_mscale is not supported"),
        ({"rope_scaling": LONGROPE, "original_max_position_embeddings": 1}, "above 1"),
        ({"rope_scaling": {"type": ["yarn"]}}, "['yarn'] is not supported"),
        ({"model_type": "glm", "partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"model_type": "glm", "head_dim": 6}, "rotates 3 of 6 elements"),
        ({"model_type": "glm", "partial_rotary_factor": 0}, "rotates 0 of 128 elements"),
        ({"partial_rotary_factor": 0.5}, "Partial rotary"),
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor is 'x'"),
        ({"num_key_value_layers": "2"}, "num_key_value_layers"),
        ({"num_key_value_layers": 2.0}, "num_key_value_layers"),
        ({"num_key_value_layers": 2, "key_value_group_size": 0}, "group_size is 0"),
        ({"num_key_value_layers": 2, "swiftkv": "false"}, "swiftkv"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0 in config.json; it must be from 1 to 4096"),
        ({"head_dim": "16"}, "head_dim"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan in config.json; it must be a number from"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"rope_theta": float("nan")}, "rope_theta is nan in config.json"),
        ({"rope_theta": float("inf")}, "rope_theta is inf in config.json"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": float("nan")}}, "low_freq_factor is nan"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "must be above low_freq_factor"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000 in config.json; it must be from 1 to 4096"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776"),
        ({"hidden_act": ["gelu"] * 10**5}, "hidden_act ['gelu'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"model_type": "mistral", "sliding_window": "4"}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": -4}, "sliding_window"),
        ({"model_type": "mistral", "layer_types": 5}, "layer_types"),
        ({**GEMMA, "layer_types": 5}, "layer_types"),
        ({**GEMMA, "layer_types": ["full_attention"]}, "layer_types has 1 entries for"),
        ({**GEMMA, "sliding_window": None}, "no sliding_window"),
        ({**GEMMA, "rope_parameters": {"full_attention": 1e6}}, "an object with one for each of full_attention and"),
        ({**GEMMA, "rope_scaling": {"type": "linear"}}, "needs factor"),
        ({**GEMMA, "rope_local_base_freq": 0}, "rope_theta is 0"),
        (
            {**GEMMA, "final_logit_softcapping": 30.0},
            "final_logit_softcapping 30.0 of gemma3_text is not supported; it must be null",
        ),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention True of gemma3_text is not"),
        ({**GEMMA, "hidden_activation": "silu"}, "only gelu_pytorch_tanh is"),
        ({**GEMMA, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (
            {**GEMMA, "num_key_value_layers": 16, "key_value_group_size": 2},
            "Layers 16 and 17 would share one K,V cache, but only one of them has a sliding window",
        ),
        ({"model_type": "mistral", "layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError) as error:
        load_config({**BASE, "model_type": "llama", **changes})
    assert sentence in str(error.value) and str(error.value).endswith(".")
