"""Mixtures of experts: what of a checkpoint reaches the engine, tokens that all go to the same experts, and what is
refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.checkpoint.text_part import what_is_left_out
from kvforge.common.errors import BuildError, CheckpointError
from kvforge.compiler.convert import FREQUENCIES, convert_weights
from kvforge.compiler.options import BuildOptions, resolve
from kvforge.compiler.stream_basis import rotate
from kvforge.costs.weights import num_parameters, weight_bytes
from kvforge.quantize import quantize_checkpoint
from model_defs import ModelError, load_config
from model_defs.reference import reference_logits
from plugins.expert_linear import pack_experts
from plugins.packed_linear.packing import IN_STEPS
from tests.support.models.checkpoints import SMALL, load_weights, make_checkpoint
from tests.support.rounding import assert_near, config_of, model_error, rounded_model_error
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.eager import eager_session

DENSE_LAYER = {"mlp_only_layers": [1], "norm_topk_prob": True, "num_hidden_layers": 4}
OPTIONS = {"page_size": 8, "max_num_tokens": 64}


def edited(path: Path, **changes: Any) -> Path:
    """The checkpoint with other fields in its config.json; None removes one."""
    hf = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in hf.items() if value is not None}))
    return path


def set_routers_to_zero(path: Path) -> None:
    """Make the first experts the choice of every token, and all of these count the same."""
    stored = load_file(path / "model.safetensors")
    routers = {name: torch.zeros_like(tensor) for name, tensor in stored.items() if name.endswith(".gate.weight")}
    save_file(stored | routers, path / "model.safetensors", metadata={"format": "pt"})


def prompt(num_tokens: int = 40) -> torch.Tensor:
    return torch.randint(3, 320, (num_tokens,), generator=torch.Generator().manual_seed(3))


def logits(path: Path, tokens: torch.Tensor, chunk: int, **options: Any) -> torch.Tensor:
    driver = StepDriver(eager_session(path, BuildOptions(**OPTIONS, **options)), seed=chunk)
    return torch.cat([driver.run(part.tolist()) for part in tokens.split(chunk)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, IN_STEPS])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_stacked_in_their_order_and_the_router_is_not_quantized(family, dtype, tmp_path) -> None:
    path = make_checkpoint(tmp_path / "c", family, dtype=torch.bfloat16, num_hidden_layers=1)
    config, weights = config_of(path), load_weights(path)
    convert_weights(open_model(path), config, torch.bfloat16, tmp_path / "w", packed_dtype=dtype)
    engine, mlp = load_file(tmp_path / "w"), "model.layers.0.mlp"
    gate, up, down = (
        torch.stack([weights[f"{mlp}.experts.{expert}.{part}_proj.weight"] for expert in range(8)])
        for part in ("gate", "up", "down")
    )
    gain = weights["model.layers.0.post_attention_layernorm.weight"]
    for name, stacked in (("gate_up", torch.cat((gate, up), 1)), ("down", down)):
        if dtype in (torch.int8, IN_STEPS):  # the residual stream is in another basis
            stacked = rotate(stacked.float() * gain) if name == "gate_up" else rotate(stacked.mT).mT
        packed, scales = pack_experts(stacked, dtype, gated=name == "gate_up")
        assert torch.equal(engine[f"layers.0.experts.{name}.packed"], packed)
        assert scales is None or torch.equal(engine[f"layers.0.experts.{name}.scales"], scales)
    assert engine["layers.0.experts.router.packed"].dtype == torch.bfloat16
    assert "layers.0.experts.router.scales" not in engine


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("int8", torch.int8), ("int4", IN_STEPS)])
def test_the_weights_in_memory_are_those_that_are_counted(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With as many experts as fill a panel of the router, and a dense layer."""
    shape = {"num_experts": 64, "num_local_experts": 64, "num_hidden_layers": 2, "decoder_sparse_step": 2}
    path = make_checkpoint(tmp_path / "c", "qwen3_moe", dtype=torch.bfloat16, **shape)
    config = config_of(path)
    parameters = convert_weights(
        open_model(path), config, torch.bfloat16, tmp_path / "w", packed_dtype=dtype
    ).num_parameters
    held = sum(tensor.nbytes for key, tensor in load_file(tmp_path / "w").items() if key != FREQUENCIES)
    counted = config
    assert (num_parameters(counted), weight_bytes(counted, name)) == (parameters, held)


@pytest.mark.parametrize("case", ["plain", "cut"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_all_tokens_to_the_same_experts(family: str, case: str, tmp_path: Path) -> None:
    """A router of zeros chooses the first expert for every token, and no other gets one; also next to a dense layer."""
    cut = {"cut": 2, "group_size": 2} if case == "cut" else {}
    shape = DENSE_LAYER if family == "qwen3_moe" else {}
    path = make_checkpoint(tmp_path / "c", family, num_experts_per_tok=1, **cut, **shape)
    weights = {
        name: torch.zeros_like(x) if ".gate.weight" in name else x
        for name, x in load_file(path / "model.safetensors").items()
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config, tokens = config_of(path), prompt()
    expected = reference_logits(config, load_weights(path), tokens)
    for chunk in (1, 7, 40):
        assert_near(logits(path, tokens, chunk), expected, model_error(config, len(tokens)), chunk)


@pytest.mark.parametrize(("weight_dtype", "bound"), [("auto", None), ("int8", 0.05), ("int4", 0.4)])
def test_quantized_experts_stay_near_the_reference(weight_dtype: str, bound: float | None, tmp_path: Path) -> None:
    """With all experts active and as much of each, as rounding may send a token to another one or make it count more.
    The bounds are those of test_packed_graphs, of weights that are rounded to the nearest."""
    shape = DENSE_LAYER | {"num_hidden_layers": 3, "num_experts_per_tok": 8}
    path = make_checkpoint(tmp_path / "c", "qwen3_moe", cut=1, group_size=2, dtype=torch.bfloat16, **shape)
    set_routers_to_zero(path)
    config, tokens = config_of(path), prompt()
    found = logits(path, tokens, 40, weight_dtype=weight_dtype, calibration="none")
    expected = reference_logits(config, {name: x.float() for name, x in load_weights(path).items()}, tokens)
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert error < (bound or rounded_model_error(config, torch.bfloat16))


def test_int4_rounds_experts_that_no_token_of_the_calibration_met(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", "mixtral", cut=1, num_hidden_layers=2, dtype=torch.bfloat16)
    set_routers_to_zero(path)
    quantize_checkpoint(path, tmp_path / "int4", "int4", num_samples=2, num_tokens=256)
    checkpoint = open_model(tmp_path / "int4")
    config = read_model_config(checkpoint)
    check_weights(checkpoint, config)
    experts = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (0, 7)]
    assert all(checkpoint.codes(name) is not None for name in experts)
    assert checkpoint.codes("model.layers.1.mlp.gate.weight") is None
    assert logits(tmp_path / "int4", prompt(), 40, weight_dtype="int4").isfinite().all()


def test_layers_for_further_tokens_are_left_out_and_the_bias_is_float32(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", "glm4_moe", num_hidden_layers=2, num_nextn_predict_layers=1)
    expected = logits(path, prompt(), 40)
    assert what_is_left_out(path) is None
    stored = load_file(path / "model.safetensors")
    save_file(
        stored | {"model.layers.2.eh_proj.weight": torch.ones(3)}, path / "model.safetensors", metadata={"format": "pt"}
    )
    assert what_is_left_out(path) == f"of {path} model.layers.2 for multi-token prediction is left out"
    assert torch.equal(logits(path, prompt(), 40), expected)
    convert_weights(open_model(path), config_of(path), torch.bfloat16, tmp_path / "w")
    bias = load_file(tmp_path / "w")["layers.1.experts.score_bias"]
    assert torch.equal(bias[:8], stored["model.layers.1.mlp.gate.e_score_correction_bias"])
    checkpoint = open_model(edited(path, num_nextn_predict_layers=None))
    with pytest.raises(CheckpointError, match="more layers than the 2"):
        check_weights(checkpoint, read_model_config(checkpoint))


@pytest.mark.parametrize("target", ["cuda", "tensorrt"])
def test_other_targets_are_refused(target: str) -> None:
    config = load_config({**SMALL, "model_type": "mixtral"})
    with pytest.raises(BuildError, match=rf"mixtral \(a mix.*\) needs --target cpu.* {target} "):
        resolve(BuildOptions(target=target), config, "BF16")
    config = load_config({**SMALL, "model_type": "gemma3_text"})
    with pytest.raises(BuildError, match=rf"gemma3_text \(an .*\) needs --target cpu.* {target} .*; build with"):
        resolve(BuildOptions(target=target), config, "BF16")


def test_the_number_of_experts_has_two_names() -> None:
    hf = {key: value for key, value in SMALL.items() if not key.startswith("num_") or "expert" not in key}
    hf |= {"model_type": "qwen3_moe", "num_experts_per_tok": 2}
    counts = {load_config({**hf, name: 8}).experts.num_experts for name in ("num_experts", "num_local_experts")}
    assert counts == {8}
    with pytest.raises(ModelError, match="num_experts and num_local_experts"):
        load_config({**hf, "num_experts": 8, "num_local_experts": 4})


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 3]}, (1, 2)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": []}, (2,)),
    ],
)
def test_which_layers_have_experts(fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert load_config({**SMALL, "model_type": "qwen3_moe", **fields}).experts.layers == layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 2**13, "num_local_experts": 2**13}, "8192 experts; it must have from 1 to 4096"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be from 1 to the 8 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "says of every layer that it has none"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers is '0'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
    ],
)
def test_impossible_mixtures_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_config({**SMALL, "model_type": "qwen3_moe", **fields})


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    path = edited(make_checkpoint(tmp_path / "c", "mixtral"), num_local_experts=9, num_experts=None)
    checkpoint = open_model(path)
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.gate.weight .* has shape \[8, 64\]"):
        check_weights(checkpoint, read_model_config(checkpoint))
