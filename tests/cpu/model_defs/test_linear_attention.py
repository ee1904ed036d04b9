"""Linear attention: graphs and reference against transformers in float32 and float64, what of a checkpoint is read,
what a sequence keeps, and what is refused."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvforge.checkpoint.model import (
    check_is_rewired,
    check_is_trained,
    check_weights,
    open_model,
    read_model_config,
)
from kvforge.checkpoint.text_part import what_is_left_out
from kvforge.cli import main
from kvforge.common.errors import BuildError, CheckpointError
from kvforge.compiler.convert import convert_weights
from kvforge.compiler.export import ExportedGraph, export_lower, export_upper
from kvforge.compiler.graph_checks import verify
from kvforge.compiler.options import BuildOptions, resolve
from kvforge.costs.cache import kv_bytes, state_bytes
from kvforge.costs.flops import full_token
from kvforge.kv_policies import Full
from kvforge.planning.plan import Fleet, PlannedWorkload, list_variants, make_plan
from kvforge.planning.sequence_memory import plan_policy
from kvforge.runtime.sessions.session import Session
from model_defs import ModelConfig, ModelError, load_config
from model_defs.gated_conv import GatedConv
from model_defs.reference import reference_logits
from perf.harness import published_shapes
from tests.support.models.checkpoints import MAMBA, SMALL, load_weights, make_checkpoint, own_fields
from tests.support.models.logits import transformers_logits
from tests.support.rounding import assert_near, config_of, model_error, rounded_model_error
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.eager import eager_session

NEXT, DENSE, MOE, LFM, GRANITE, BAMBA, NEMOTRON = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "granitemoehybrid", "bamba", "nemotron_h"),
)
OPTIONS = BuildOptions(page_size=8, max_num_tokens=128)
LINEAR, FULL, CONV = "linear_attention", "full_attention", "conv"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "as published, by key head": (NEXT, {}),
    "as published, part by part": (DENSE, {}),
    "with experts": (MOE, {"num_experts_per_tok": 3}),
    "odd sizes": (
        NEXT,
        {"linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_key_head_dim": 7, "linear_value_head_dim": 19},
    ),
    "a long convolution, one head": (
        DENSE,
        {"linear_conv_kernel_dim": 7, "linear_num_key_heads": 1, "linear_num_value_heads": 1, "num_key_value_heads": 1},
    ),
    "biases, tied, a short convolution": (
        DENSE,
        {"attention_bias": True, "tie_word_embeddings": True, "linear_conv_kernel_dim": 2},
    ),
    "MLPs between experts": (
        NEXT,
        {"decoder_sparse_step": 2, "norm_topk_prob": False, "layer_types": [FULL, LINEAR, FULL, LINEAR, LINEAR]},
    ),
    "YaRN over half of a head": (
        NEXT,
        {"mlp_only_layers": [0], "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    ),
    "no linear attention at all": (DENSE, {"layer_types": [FULL] * 5}),
    "gated convolutions": (LFM, {}),
    "longer ones, not tied": (
        LFM,
        {"conv_L_cache": 5, "tie_word_embeddings": False, "layer_types": None, "full_attn_idxs": [1, 4]},
    ),
    "an MLP whose size is adjusted": (LFM, {"block_auto_adjust_ff_dim": True, "block_multiple_of": 24}),
    "Mamba-2": (GRANITE, {**MAMBA, "num_hidden_layers": 4}),
    "Mamba-2 beside experts, RoPE": (
        GRANITE,
        {**MAMBA, "num_hidden_layers": 4, "num_local_experts": 8, "position_embedding_type": "rope"},
    ),
    "Mamba-2 with plain MLPs and biases": (
        BAMBA,
        {"attn_layer_indices": [1, 3], "attention_bias": True, "mlp_bias": True, "mamba_n_groups": 2},
    ),
    "Mamba-2, odd sizes": (
        GRANITE,
        {
            **{"layer_types": [LINEAR, FULL, LINEAR, FULL, LINEAR], "mamba_n_heads": 9, "mamba_n_groups": 3},
            **{"mamba_d_state": 7, "mamba_d_conv": 7, "hidden_size": 72, "mamba_d_head": 16, "num_attention_heads": 3},
            **{"num_key_value_heads": 1, "tie_word_embeddings": True, "position_embedding_type": "nope"},
        },
    ),
    "a mixer or an MLP alone": (NEMOTRON, {}),
    "experts of one group, MLPs first and in a row": (
        NEMOTRON,
        {
            "layer_types": ["mlp", "moe", "linear_attention", "full_attention", "linear_attention", "moe", "mlp"],
            **{"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_experts_per_tok": 3},
        },
    ),
    "a mixer or an MLP alone, odd sizes, biases": (
        NEMOTRON,
        {
            "layer_types": ["full_attention", "full_attention", "linear_attention", "mlp", "linear_attention"],
            **{"hidden_size": 72, "mamba_num_heads": 9, "n_groups": 3, "ssm_state_size": 7, "conv_kernel": 7},
            **{"mamba_head_dim": 11, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10},
            **{"mlp_bias": True, "layer_norm_epsilon": 1e-3},
        },
    ),
}


def tokens_of(count: int = 100) -> Tensor:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(5))


def session_of(path: Path, **options: Any) -> Session:
    return eager_session(path, dataclasses.replace(OPTIONS, **options))


def logits(session: Session, tokens: Tensor, chunk: int) -> Tensor:
    """Logits of every position: most tokens in chunks, the last ones one by one."""
    driver = StepDriver(session, seed=chunk)
    return torch.cat([driver.run(part.tolist()) for part in (*tokens[:-9].split(chunk), *tokens[-9:].split(1))])


@pytest.mark.parametrize("case", CASES)
def test_graphs_and_reference_equal_transformers(case: str, tmp_path: Path) -> None:
    family, fields = CASES[case]
    path = make_checkpoint(tmp_path / "c", family, **{"num_hidden_layers": 5, **fields})
    tokens, config = tokens_of(), config_of(path)
    assert (config.linear is None) == (case == "no linear attention at all")
    expected, rounding = transformers_logits(path, tokens), model_error(config, len(tokens))
    assert_near(reference_logits(config, load_weights(path), tokens), expected, rounding)
    session = session_of(path)
    for chunk in (1, 7, 91):
        assert_near(logits(session, tokens, chunk), expected, rounding, chunk)


@pytest.mark.parametrize("family", [NEXT, DENSE, MOE, LFM, GRANITE, BAMBA, NEMOTRON])
def test_the_reference_is_transformers_in_float64(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both with every float32 of theirs as float64, so that nothing but the formulas is compared."""
    mamba = {**MAMBA, "num_local_experts": 8, "position_embedding_type": "rope"}
    path = make_checkpoint(tmp_path / "c", family, **(mamba if family == GRANITE else {}))
    weights = {name: tensor.double() for name, tensor in load_weights(path).items()}
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, **plain).double().eval()
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    if hasattr(model.model, "rotary_emb"):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with torch.no_grad():
        expected = model(tokens_of()[None]).logits[0]
    assert expected.dtype == torch.float64
    assert_near(reference_logits(config_of(path), weights, tokens_of()), expected, 1e-11)


def test_projections_by_key_head_are_those_part_by_part(tmp_path: Path) -> None:
    """The engine's tensors of a checkpoint in one layout are those of the same model in the other."""
    path = make_checkpoint(tmp_path / "c", NEXT)
    config, stored = config_of(path), load_weights(path)
    assert config.linear is not None
    linear = config.linear
    other = dataclasses.replace(config, linear=dataclasses.replace(linear, by_key_head=False))
    for layer in linear.layers:
        name = f"model.layers.{layer}.linear_attn.in_proj_"
        both = stored.pop(f"{name}qkvz.weight").unflatten(0, (linear.num_key_heads, -1))
        values = linear.values_dim // linear.num_key_heads
        *qkv, z = both.split((linear.key_dim, linear.key_dim, values, values), dim=1)
        b, a = stored.pop(f"{name}ba.weight").unflatten(0, (linear.num_key_heads, 2, -1)).unbind(1)
        parts = {"qkv": torch.cat([part.flatten(0, 1) for part in qkv]), "z": z.flatten(0, 1)}
        parts |= {"b": b.flatten(0, 1), "a": a.flatten(0, 1)}
        stored |= {f"{name}{part}.weight": tensor.contiguous() for part, tensor in parts.items()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text((path / "config.json").read_text())
    save_file({name: x.clone() for name, x in stored.items()}, tmp_path / "other" / "model.safetensors")
    for folder, model in ((path, config), (tmp_path / "other", other)):
        convert_weights(open_model(folder), model, torch.float32, tmp_path / f"{folder.name}.w")
    one, two = load_file(tmp_path / "c.w"), load_file(tmp_path / "other.w")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_decays_are_float32_and_gains_as_they_are(tmp_path: Path) -> None:
    """Norms are stored less one, but for that of the result."""
    path = make_checkpoint(tmp_path / "c", DENSE, dtype=torch.bfloat16)
    convert_weights(open_model(path), config_of(path), torch.bfloat16, tmp_path / "w", packed_dtype=torch.int8)
    found, stored = load_file(tmp_path / "w"), load_weights(path)
    assert torch.equal(found["layers.0.state.decay_log"][:4], stored["model.layers.0.linear_attn.A_log"].float())
    assert found["layers.0.state.decay_bias"].dtype == torch.float32
    assert torch.equal(found["layers.0.result_norm.weight"], stored["model.layers.0.linear_attn.norm.weight"])
    assert torch.equal(found["layers.3.q_norm.weight"][0], stored["model.layers.3.self_attn.q_norm.weight"][0] + 1)
    assert found["layers.0.ba.packed"].dtype == torch.bfloat16 and found["layers.0.qkvz.packed"].dtype == torch.int8


def rounded(weight: Tensor, bits: int, group: int) -> Tensor:
    """A matrix with so many bits a number, and a scale of each group of a row."""
    parts, most = weight.unflatten(-1, (-1, group)), 2 ** (bits - 1) - 1
    scale = parts.abs().amax(-1, keepdim=True) / most
    return ((parts / scale).round() * scale).flatten(-2)


def test_engines_round_as_their_weights_do(tmp_path: Path) -> None:
    """Random layers with linear attention multiply what is rounded, so the measure is what rounding the matrices alone
    does; activations are rounded besides, to bfloat16 or int8."""
    path = make_checkpoint(tmp_path / "c", DENSE, dtype=torch.bfloat16)
    weights, config = {name: x.float() for name, x in load_weights(path).items()}, config_of(path)
    exact = reference_logits(config, weights, tokens_of())
    kept = ("in_proj_a", "in_proj_b", "embed_tokens")

    def error(found: Tensor) -> float:
        return float((found - exact).square().mean().sqrt() / exact.std())

    assert error(logits(session_of(path), tokens_of(), 40)) < rounded_model_error(config, torch.bfloat16)
    for weight_dtype, bits, group, most in (("int8", 8, 0, 4.0), ("int4", 4, 32, 1.3)):
        matrices = {n: x for n, x in weights.items() if x.dim() == 2 and not any(part in n for part in kept)}
        alone = {n: rounded(x, bits, group or x.shape[1]) for n, x in matrices.items()}
        effect = error(reference_logits(config, weights | alone, tokens_of()))
        found = logits(session_of(path, weight_dtype=weight_dtype, calibration="none"), tokens_of(), 40)
        assert error(found) < most * effect, (weight_dtype, effect)


def test_tensors_for_further_tokens_are_left_out_with_a_note(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", NEXT)
    expected = logits(session_of(path), tokens_of(30), 40)
    assert what_is_left_out(path) is None
    more = {"mtp.fc.weight": torch.ones(3), "mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 3, 4)}
    save_file(load_file(path / "model.safetensors") | more, path / "model.safetensors", metadata={"format": "pt"})
    assert what_is_left_out(path) == f"of {path} mtp for multi-token prediction is left out"
    assert torch.equal(logits(session_of(path), tokens_of(30), 40), expected)


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


@pytest.fixture(scope="module")
def lower(model: ModelConfig) -> ExportedGraph:
    """Tests that change it do so in a copy."""
    return export_lower(model, resolve(OPTIONS, model, "F32"))


def test_exported_graphs_pass_the_verifier(lower: ExportedGraph, model: ModelConfig) -> None:
    resolved = resolve(OPTIONS, model, "F32")
    for graph in (lower, export_upper(model, resolved)):
        verify(graph, model, resolved)


@pytest.mark.parametrize("options", [{"kv_dtype": "int4"}, {"dtype": "bfloat16", "weight_dtype": "int4"}])
def test_graphs_of_few_bits_pass_the_verifier(options: dict[str, Any], model: ModelConfig) -> None:
    resolved = resolve(dataclasses.replace(OPTIONS, **options), model, "F32")
    for export in (export_lower, export_upper):
        verify(export(model, resolved), model, resolved)


def other_pool(calls: list[Any]) -> None:
    calls[2].args = (*calls[2].args[:-1], calls[0].args[-1])


def other_order(calls: list[Any]) -> None:
    calls[1].args = (*calls[1].args[:-1], calls[3].args[-1])
    calls[3].args = (*calls[3].args[:-1], calls[1].args[-1])


def other_rows(calls: list[Any]) -> None:
    calls[0].args = (*calls[0].args[:3], calls[0].args[2], *calls[0].args[4:])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (other_pool, "calls kvforge::short_conv on another pool than"),
        (other_order, "calls kvforge::gated_delta_rule on another pool than"),
        (other_rows, "as rows of states; they must be"),
        (lambda calls: calls[-1].graph.erase_node(calls[-1]), "has 5 operators on states; the model asks for 6"),
    ],
)
def test_a_graph_that_takes_other_states_is_refused(
    damage: Any, sentence: str, lower: ExportedGraph, model: ModelConfig
) -> None:
    graph, resolved = copy.deepcopy(lower), resolve(OPTIONS, model, "F32")
    names = ("short_conv", "gated_delta_rule")
    calls = [node for node in graph.program.graph.nodes if any(name in str(node.target) for name in names)]
    if sentence.startswith("has"):
        calls[-1].replace_all_uses_with(calls[-3])
    damage(calls)
    with pytest.raises(BuildError, match=sentence):
        verify(graph, model, resolved)


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
        ({"linear_value_head_dim": 8}, "linear_value_head_dim is 8; it must be at least 16"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be at least 2"),
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
    check_is_trained(open_model(make_checkpoint(tmp_path / "hybrid", GRANITE, **MAMBA)))
    experts = open_model(make_checkpoint(tmp_path / "experts", GRANITE, num_local_experts=8))
    with pytest.raises(CheckpointError, match=f"type {GRANITE}, which kvforge does not distil or calibrate"):
        check_is_trained(experts)
    check_is_rewired(experts)


def test_a_kind_of_states_without_a_form_above_a_cut_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatedConv, "read_operators", ())
    hf = {**SMALL, "model_type": f"{LFM}_swiftkv", "full_attn_idxs": [1], "num_key_value_layers": 2}
    with pytest.raises(ModelError, match="it has a cut, above which prompt tokens skip layers; take it without one"):
        load_config(hf)
    load_config({**hf, "num_key_value_layers": 4})


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int4"}, {"dtype": "bfloat16", "weight_dtype": "int4"}])
@pytest.mark.parametrize("family", [GRANITE, NEMOTRON])
def test_exported_graphs_with_mamba_pass_the_verifier(family: str, options: dict[str, Any]) -> None:
    own = MAMBA if family == GRANITE else own_fields(family, SMALL)
    model = load_config({**SMALL, **own, "model_type": family})
    resolved = resolve(dataclasses.replace(OPTIONS, **options), model, "F32")
    for export in (export_lower, export_upper):
        verify(export(model, resolved), model, resolved)


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


def test_a_text_part_is_read_by_its_own_names(tmp_path: Path) -> None:
    """What the published checkpoints say: the text's fields inside, its tensors below ``model.language_model.``."""
    path = make_checkpoint(tmp_path / "c", DENSE)
    hf = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": hf, "vision_config": {}}))
    expected = load_file(path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): x for name, x in expected.items()}
    save_file(renamed | {"model.visual.x": torch.ones(2), "mtp.norm.weight": torch.ones(2)}, path / "model.safetensors")
    checkpoint = open_model(path)
    check_weights(checkpoint, read_model_config(checkpoint))
    assert set(checkpoint.file_of_tensor) == set(expected)
