"""Linear attention, gated convolutions and Mamba-2: graphs and reference against transformers in float32 and float64,
and what of a checkpoint is read."""

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
    check_weights,
    open_model,
    read_model_config,
)
from kvforge.checkpoint.text_part import what_is_left_out
from kvforge.common.errors import BuildError
from kvforge.compiler.convert import convert_weights
from kvforge.compiler.export import ExportedGraph, export_lower, export_upper
from kvforge.compiler.graph_checks import verify
from kvforge.compiler.options import BuildOptions, resolve
from kvforge.runtime.sessions.session import Session
from model_defs import ModelConfig, load_config
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import MAMBA, SMALL, load_weights, make_checkpoint, own_fields
from tests.support.models.logits import transformers_logits
from tests.support.rounding import assert_near, config_of, model_error, rounded_model_error
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.eager import eager_session

NEXT, DENSE, MOE, LFM, GRANITE, BAMBA, NEMOTRON, KIMI = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "granitemoehybrid", "bamba", "nemotron_h"),
    "kimi_linear",
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
    "decays by channel and latents": (KIMI, {}),
    "decays by channel, odd sizes, a latent of queries": (
        KIMI,
        {
            "layer_types": [FULL, LINEAR, LINEAR, LINEAR, FULL],
            **{"linear_num_heads": 5, "linear_head_dim": 19, "linear_conv_kernel_dim": 7, "hidden_size": 72},
            **{"num_attention_heads": 3, "q_lora_rank": 20, "kv_lora_rank": 26, "v_head_dim": 9},
            **{"mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse"], "rms_norm_eps": 1e-3},
        },
    ),
    "decays by channel, experts of one group, one head": (
        KIMI,
        {
            "layer_types": [LINEAR, LINEAR, FULL, FULL, LINEAR],
            **{"linear_num_heads": 1, "linear_conv_kernel_dim": 2, "n_group": 1, "topk_group": 1},
            **{"norm_topk_prob": False, "num_experts_per_tok": 3},
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


@pytest.mark.parametrize("family", [NEXT, DENSE, MOE, LFM, GRANITE, BAMBA, NEMOTRON, KIMI])
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


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int4"}, {"dtype": "bfloat16", "weight_dtype": "int4"}])
@pytest.mark.parametrize("family", [GRANITE, NEMOTRON])
def test_exported_graphs_with_mamba_pass_the_verifier(family: str, options: dict[str, Any]) -> None:
    own = MAMBA if family == GRANITE else own_fields(family, SMALL)
    model = load_config({**SMALL, **own, "model_type": family})
    resolved = resolve(dataclasses.replace(OPTIONS, **options), model, "F32")
    for export in (export_lower, export_upper):
        verify(export(model, resolved), model, resolved)


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
