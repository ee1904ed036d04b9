"""Layers that keep a state: what a sequence keeps, what plans count, and which configurations are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvforge.checkpoint.model import (
    check_is_rewired,
    open_model,
)
from kvforge.cli import main
from kvforge.common.errors import BuildError, CheckpointError
from kvforge.common.records import read_record
from kvforge.compiler.options import BuildOptions, resolve
from kvforge.costs.cache import kv_bytes, state_bytes
from kvforge.costs.flops import full_token
from kvforge.costs.weights import num_parameters
from kvforge.kv_policies import Full
from kvforge.planning.plan import Fleet, PlannedWorkload, list_variants, make_plan
from kvforge.planning.sequence_memory import plan_policy
from model_defs import ModelConfig, ModelError, load_config
from model_defs.gated_conv import GatedConv
from perf.harness import published_shapes
from tests.support.models.checkpoints import MAMBA, SMALL, make_checkpoint, own_fields

NEXT, DENSE, MOE, LFM, GRANITE, BAMBA, NEMOTRON, KIMI = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "granitemoehybrid", "bamba", "nemotron_h"),
    "kimi_linear",
)
LINEAR, FULL, CONV = "linear_attention", "full_attention", "conv"


PUBLISHED = {
    "model_type": NEXT,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "max_position_embeddings": 262144,
}


def test_what_a_sequence_of_the_published_model_keeps() -> None:
    config = load_config(PUBLISHED)
    assert config.owners == tuple(range(3, 48, 4)) and len(config.linear_layers) == 36
    assert state_bytes(config, "bfloat16") == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert kv_bytes(config, "bfloat16") == 12 * 2 * 2 * 256 * 2
    short, long = (full_token(config, context).attention for context in (0, 1000))
    assert short == 36 * (7 * 32 * 128 * 128 + 2 * 4 * 8192)
    assert long - short == 1000 * 12 * 4 * 16 * 256


def test_what_a_sequence_of_the_published_model_with_mamba_keeps() -> None:
    config = load_config(published_shapes.PUBLISHED["Granite-4.0-H-Tiny"])
    assert config.owners == (5, 15, 25, 35) and len(config.linear_layers) == 36
    assert state_bytes(config, "bfloat16") == 36 * (48 * 128 * 64 * 4 + 3 * 3328 * 2)
    assert kv_bytes(config, "bfloat16") == 4 * 2 * 4 * 128 * 2
    assert full_token(config, 0).attention == 36 * (5 * 128 * 3072 + 2 * 3072 + 2 * 4 * 3328)


def test_what_a_sequence_of_the_published_model_of_lone_parts_keeps() -> None:
    """Only layers with attention have K and V, and only those of Mamba-2 a state; no others cost either."""
    config = load_config(published_shapes.PUBLISHED["Nemotron-3-Nano-30B-A3B"])
    assert (len(config.owners), len(config.linear_layers), len(config.layers_without_mixer)) == (6, 23, 23)
    assert {*config.owners, *config.linear_layers} == {*config.layers_without_mlp}
    assert state_bytes(config, "bfloat16") == 23 * (64 * 128 * 64 * 4 + 3 * 6144 * 2)
    assert kv_bytes(config, "bfloat16") == 6 * 2 * 2 * 128 * 2
    short, long = (full_token(config, context) for context in (0, 1000))
    assert long.attention - short.attention == 1000 * 6 * 4 * 32 * 128
    assert short.attention == 23 * (5 * 128 * 4096 + 2 * 4096 + 2 * 4 * 6144)
    assert short.mlp == 23 * 2 * 2688 * (2 * (6 * 1856 + 3712) + 128)
    assert short.query_output == 2 * 2688 * (23 * (4096 + 6144 + 64 + 4096) + 6 * 2 * 4096)


def test_what_a_sequence_of_the_published_model_with_latents_keeps() -> None:
    config = load_config(published_shapes.PUBLISHED["Kimi-Linear-48B-A3B"])
    assert (len(config.owners), len(config.linear_layers), config.owners[-2:]) == (7, 20, (23, 26))
    assert state_bytes(config, "bfloat16") == 20 * (32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2)
    assert kv_bytes(config, "bfloat16") == 7 * 2 * (512 + 64)
    assert round(num_parameters(config) / 1e9, 1) == 49.1
    short, long = (full_token(config, context) for context in (0, 1000))
    assert long.attention - short.attention == 1000 * 7 * 2 * 32 * (2 * 512 + 64)
    assert short.attention == 20 * (7 * 128 * 4096 + 2 * 4 * 3 * 4096)
    assert short.mlp == 6 * 2304 * 9216 + 26 * (6 * 2304 * 9 * 1024 + 2 * 2304 * 256)


def of_numbers(full: list[int], linear: list[int]) -> dict[str, list[int]]:
    return {"full_attn_layers": full, "kda_layers": linear}


def of_layers(kinds: list[str]) -> dict[str, Any]:
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def test_a_plan_counts_states() -> None:
    config = load_config(PUBLISHED)
    work, fleet = PlannedWorkload(1000, 24), Fleet((200.0,))
    variants = list_variants("m", config, (), (1,), ["bfloat16"], False)
    plan = make_plan("m", config, variants, work, fleet)
    assert [row["name"] for row in plan["variants"]] == ["no cut"]
    state = plan["variants"][0]["state_bytes_per_request"]
    free = (200 - 0.25) * 2**30 - plan["variants"][0]["weight_bytes"]
    assert state == state_bytes(config, "bfloat16") > 1024 * kv_bytes(config, "bfloat16")
    assert plan["capacity"][0]["variants"][0]["requests"] == free // (state + 1024 * 24576)
    by_policy = plan_policy(Full(), variants, work, fleet)
    assert by_policy["variants"][0]["device_bytes"] == state + 1024 * 24576
    assert by_policy["capacity"][0]["variants"][0]["sequences"] == free // (state + 1024 * 24576)
    names = [variant.name for variant in list_variants("m", config, (24,), (1, 2), ["bfloat16"], True)]
    assert names == ["no cut", "cut 24 of 48", "cut 24 of 48, 2-way"]


@pytest.mark.parametrize(
    ("name", "cut", "what"),
    [
        ("Qwen3-Next-80B-A3B", "cut 24 of 48", "qwen3_next (linear attention)"),
        ("LFM2-1.2B", "cut 8 of 16", "lfm2 (gated short convolutions)"),
        ("Granite-4.0-H-Tiny", "cut 20 of 40", "granitemoehybrid (Mamba-2)"),
        ("Nemotron-3-Nano-30B-A3B", None, "nemotron_h (Mamba-2)"),
        ("Kimi-Linear-48B-A3B", "cut 13 of 27", "kimi_linear (latent attention)"),
    ],
)
def test_a_plan_has_a_cut_where_the_layers_may_be_above_one(
    name: str, cut: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_shapes.PUBLISHED[name]))
    assert main(["plan", "--model", str(tmp_path / "config.json"), "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["variants"]]
    assert (cut in names) if cut else names == ["no cut"]
    assert main(["plan", "--model", str(tmp_path / "config.json"), "--kv-policy", "h2o"]) == 1
    assert f"--kv-policy h2o needs a cache that nothing else changes, but with {what}" in capsys.readouterr().err
    if not cut:
        assert main(["plan", "--model", str(tmp_path / "config.json"), "--cut", "4"]) == 1
        assert "in a model with a cut" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tensor-parallel-size", "2"), "keeps states, which ranks do not divide"),
        (("--prefix-gib", "3"), "--prefix-dir does not keep prompts of models with linear attention"),
        (
            ("--cut", "24", "--cut-kind", "blind", "--num-anchors", "4"),
            "Layers that keep a state are not supported in this model: its cut is blind; take another kind of cut.",
        ),
    ],
)
def test_what_a_plan_does_not_count_is_refused(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    assert main(["plan", "--model", str(tmp_path / "config.json"), *options]) == 1
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return load_config({**SMALL, "model_type": DENSE})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "cuda"}, "needs --target cpu, but with target cuda there are no kernels or graphs for it; build"),
        ({"target": "tensorrt"}, "needs --target cpu, but with target tensorrt"),
        ({"kv_dtype": "kivi2"}, "kivi2 needs .* keep a state in place of K and V; give --kv-dtype float32"),
        ({"kv_policy": "quest"}, "quest needs .* keep a state in place of K and V; leave --kv-policy out"),
    ],
)
def test_what_linear_attention_does_not_go_with_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        resolve(BuildOptions(**options), load_config({**SMALL, "model_type": NEXT}), "F32")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": [LINEAR] * 4}, "All layers of the model have linear attention; at least one"),
        (
            {"layer_types": [FULL, "mamba", LINEAR, FULL]},
            "must say linear_attention or full_attention of each of the 4",
        ),
        ({"layer_types": [LINEAR, FULL]}, "must say linear_attention or full_attention of each of the 4 layers"),
        ({"layer_types": 3}, "layer_types is 3"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"full_attention_interval": 5}, "All layers of the model have linear attention"),
        ({"linear_num_value_heads": 5}, "5.* must be a multiple of linear_num_key_heads .2."),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0"),
        ({"linear_key_head_dim": "x"}, "linear_key_head_dim, found 'x'"),
        ({"linear_value_head_dim": 8}, "linear_value_head_dim is 8 in config.json; it must be from 16"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1 in config.json; it must be from 2"),
        ({"linear_key_head_dim": 2**22, "linear_value_head_dim": 2**22}, "more than 16777216 numbers"),
        ({"linear_conv_kernel_dim": 2**30}, "conv_width of linear attention is 1073741824"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_unsupported_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_config({**SMALL, "model_type": NEXT, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["mamba"] * 4}, "All layers of the model are of Mamba-2; at least one must have attention"),
        ({"layer_types": None}, "layer_types is None in config.json; it must say mamba or attention of each of the 4"),
        ({"layer_types": ["mamba", "conv", FULL, FULL]}, "it must say mamba or attention of each of the 4 layers"),
        ({"layer_types": [["mamba"], FULL, FULL, FULL]}, "it must say mamba or attention of each of the 4 layers"),
        ({"position_embedding_type": "x" * 99}, r"is 'x+\.\.\.x+' in config.json; it must be rope, nope or null"),
        ({"layers_block_type": ["attention"] * 4}, "layer_types and layers_block_type of config.json differ"),
        ({"mamba_d_head": 7}, "mamba_n_heads .4. times mamba_d_head .7. must be mamba_expand times hidden_size .128."),
        ({"mamba_n_groups": 3}, "The 4 heads of Mamba-2 must be a multiple of its 3 groups"),
        ({"mamba_d_conv": 1}, "conv_width of Mamba-2 is 1; it must be at least 2"),
        ({"mamba_d_state": 2**22}, "more than 16777216 numbers"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias False of granitemoehybrid is not supported"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit .0.0, 0.1. of granitemoehybrid is not supported"),
    ],
)
def test_unsupported_configurations_of_mamba_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_config({**SMALL, **MAMBA, "model_type": GRANITE, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": None}, "config.json needs layers_block_type or layer_types or hybrid_override_pattern"),
        ({"hybrid_override_pattern": "M*-|E"}, r"hybrid_override_pattern is 'M\*-|E' .* must say M, \*, -, E of each"),
        (
            {"layers_block_type": ["mamba", 3]},
            r"layers_block_type is \['mamba', 3\] in config.json; it must say mamba, ",
        ),
        (
            {"layers_block_type": "MM"},
            "layers_block_type is 'MM' in config.json; it must say mamba, linear_attention, ",
        ),
        ({"hybrid_override_pattern": "ME*-"}, "layer_types and hybrid_override_pattern of config.json differ"),
        ({"num_hidden_layers": 7}, "num_hidden_layers is 7 in config.json, but layer_types says what 4 layers are"),
        (of_layers(["mlp", "mamba"]), "No layer of the model is of attention; at least one must be of it"),
        (of_layers(["attention", "mlp"]), "No layer of the model is of mamba; at least one must be of it"),
        ({"mlp_bias": True}, "mlp_bias is true in config.json, which is not supported in a model with experts"),
        ({"n_groups": 3}, "The 4 heads of Mamba-2 must be a multiple of its 3 groups"),
        ({"mamba_num_heads": 0}, "mamba_num_heads is 0 in config.json; it must be from 1"),
        ({"mamba_num_heads": 2, "mamba_head_dim": 4}, "The heads of Mamba-2 have 8 elements; they must have 16"),
        ({"conv_kernel": 1}, "conv_width of Mamba-2 is 1; it must be at least 2"),
        ({"mamba_d_conv": 4}, "mamba_d_conv 4 of nemotron_h is not supported; it must be null"),
        ({"moe_latent_size": 64}, "moe_latent_size 64 of nemotron_h is not supported; it must be null"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 of nemotron_h is not supported; it must be 1"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' of nemotron_h is not supported; it must be \"relu2\""),
        ({"use_bias": True}, "use_bias True of nemotron_h is not supported"),
        ({"attention_bias": True}, "attention_bias True of nemotron_h is not supported"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit .0.0, 0.1. of nemotron_h is not supported"),
        ({"swiftkv": True, "num_key_value_layers": 2}, "nemotron_h models have no SwiftKV form"),
    ],
)
def test_unsupported_configurations_of_lone_parts_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_config({**SMALL, **own_fields(NEMOTRON, SMALL), "model_type": NEMOTRON, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_max_length": 9}, "model_max_length and max_position_embeddings of config.json differ"),
        ({"num_experts_per_token": 3}, "num_experts_per_token and num_experts_per_tok of config.json differ"),
        ({"linear_attn_config": [3]}, "linear_attn_config is .3. in config.json; it must be an object"),
        ({"linear_attn_config": {"gate_lower_bound": -5}}, "has 'gate_lower_bound', which is not supported; it may"),
        ({"linear_attn_config": {"head_dim": 48}}, "head_dim of linear_attn_config and linear_head_dim of config.json"),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3]}}, "must number each of the 4 layers once, from 1 on"),
        ({"linear_attn_config": of_numbers([1, 2], [2, 3, 4])}, "must number each of the 4 layers once, from 1 on"),
        (
            {"linear_attn_config": of_numbers([1, 2], [3, 4])},
            "layer_types and linear_attn_config of config.json differ",
        ),
        ({"layer_types": [LINEAR, "mamba", LINEAR, FULL]}, "it must say linear_attention or full_attention of each of"),
        ({"layer_types": [LINEAR] * 4}, "All layers of the model have linear attention; at least one must have full_a"),
        ({"mlp_layer_types": ["dense", "moe"]}, "it must say dense or sparse of each of the 4 layers"),
        ({"linear_head_dim": 8}, "head_dim of linear attention is 8; it must be from 16 to"),
        ({"linear_conv_kernel_dim": 1}, "conv_width of linear attention is 1; it must be from 2 to"),
        ({"linear_head_dim": 2**13}, "A state of linear attention has more than 16777216 numbers"),
        ({"attention_bias": True}, "attention_bias True of kimi_linear is not supported; it must be false"),
        ({"mla_use_nope": False}, "mla_use_nope False of kimi_linear is not supported; it must be true"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax' of kimi_linear is not supp"),
        ({"num_key_value_layers": 2, "early_exit": True}, "not supported in this model: it has an early exit"),
    ],
)
def test_unsupported_configurations_with_decays_by_channel_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_config({**SMALL, **own_fields(KIMI, SMALL), "model_type": KIMI, **fields})


def test_layers_by_number_are_those_by_kind() -> None:
    hf = {**SMALL, "model_type": KIMI, "linear_num_heads": 3, "linear_head_dim": 32}
    numbered = {"head_dim": 32, "num_heads": 3, "short_conv_kernel_size": 4, **of_numbers([4], [1, 3, 2])}
    config = load_config({**hf, "linear_attn_config": numbered})
    assert config == load_config({**hf, "layer_types": [LINEAR, LINEAR, LINEAR, FULL]})
    assert config == load_config({**hf, "linear_attn_config": numbered, "layer_types": [LINEAR] * 3 + [FULL]})
    assert load_config({**hf, "num_hidden_layers": 9}).owners == (4, 8)
    assert load_config({**hf, "layer_types": [FULL] * 4}).linear is None


@pytest.mark.parametrize("family", [NEXT, LFM, GRANITE, NEMOTRON, KIMI])
def test_a_manifest_keeps_which_kind_of_states_there_are(family: str) -> None:
    config = load_config({**SMALL, **(MAMBA if family == GRANITE else own_fields(family, SMALL)), "model_type": family})
    kept = read_record(ModelConfig, json.loads(json.dumps(config.to_json())))
    assert kept == config and type(kept.linear) is type(config.linear) is not type(None)


def test_a_pattern_says_what_each_layer_is() -> None:
    hf = {**SMALL, **own_fields(NEMOTRON, SMALL), "model_type": NEMOTRON}
    del hf["num_hidden_layers"]
    config = load_config({**hf, "layer_types": None, "hybrid_override_pattern": "M-*ME"})
    assert config == load_config({**hf, "layer_types": ["mamba", "mlp", "attention", "linear_attention", "moe"]})
    assert config.owner_of_layer == (-1, -1, 2, -1, -1) and config.linear_layers == (0, 3)
    assert config.experts is not None and config.experts.layers == (4,)
    first = config.first_layers(3)
    assert (first.layers_without_mixer, first.layers_without_mlp, first.experts) == ((1,), (0, 2), None)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_without_mixer": (0, 1)},
        {"layers_without_mlp": (0, 1, 2)},
        {"layers_without_mixer": (1, 9)},
        {"layers_without_mlp": (2, 0)},
        {"layers_without_mixer": (1, 2), "layers_without_mlp": (0, 2)},
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    """A state without its mixer, experts without their MLP, a layer that is not there, an order, and nothing at all."""
    config = load_config({**SMALL, **own_fields(NEMOTRON, SMALL), "model_type": NEMOTRON})
    assert (config.layers_without_mixer, config.layers_without_mlp) == ((1, 2), (0, 3))
    with pytest.raises(ModelError, match="The parts of the model's layers do not fit each other"):
        dataclasses.replace(config, **changes)
    with pytest.raises(ModelError, match="not supported in a model with a cut or with caches that layers share"):
        dataclasses.replace(config, cut=2)


def test_what_of_a_family_with_mamba_is_not_rewired_or_trained(tmp_path: Path) -> None:
    lone = open_model(make_checkpoint(tmp_path / "lone", NEMOTRON))
    with pytest.raises(CheckpointError, match=f"type {NEMOTRON}, which kvforge does not rewire, distil or calibrate"):
        check_is_rewired(lone)
    check_is_rewired(open_model(make_checkpoint(tmp_path / "hybrid", GRANITE, **MAMBA)))


def test_a_kind_of_states_without_a_form_above_a_cut_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatedConv, "read_operators", ())
    hf = {**SMALL, "model_type": f"{LFM}_swiftkv", "full_attn_idxs": [1], "num_key_value_layers": 2}
    with pytest.raises(ModelError, match="it has a cut, above which prompt tokens skip layers; take it without one"):
        load_config(hf)
    load_config({**hf, "num_key_value_layers": 4})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_layers": 2, "cut": 2, "layer_windows": (0, 0)}, "it has fewer layers than its configuration names"),
        ({"cut": 2, "early_exit": True}, "it has an early exit"),
        ({"layer_owners": (0, 1, 2, 3)}, "its layers share caches"),
        ({"layer_windows": (9, 0, 0, 0)}, "some of its layers have a sliding window"),
        ({"branch_norms": True}, "its layers have norms behind attention and MLP"),
        ({"layer_scalar": True}, "its layers have inputs or a scalar of their own"),
    ],
)
def test_a_model_that_cannot_have_it_is_refused(changes: dict[str, Any], reason: str, model: ModelConfig) -> None:
    with pytest.raises(ModelError, match=f"Layers that keep a state are not supported in this model: {reason}"):
        dataclasses.replace(model, **changes)


def test_the_first_layers_are_a_model(model: ModelConfig) -> None:
    assert model.first_layers(1).linear_layers == (0,) and model.first_layers(4) == model
    full = load_config({**SMALL, "model_type": DENSE, "layer_types": [FULL, FULL, LINEAR, FULL]})
    assert full.first_layers(2).linear is None and full.owners == (0, 1, 3)
