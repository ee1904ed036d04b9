"""Experts that a checkpoint stores as one tensor, in bf16 and MXFP4: read, rewired, distilled, quantized, planned."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.checkpoint.mxfp4 import dequantize_mxfp4
from kvforge.cli import main
from kvforge.common.errors import BuildError, CheckpointError
from kvforge.compiler import BuildOptions
from kvforge.compiler.options import resolve
from kvforge.costs.weights import num_parameters
from kvforge.planning.load import load_subject
from kvforge.quantize import quantize_checkpoint
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.swiftkv import load_model, make_layout
from model_defs import load_config
from model_defs.reference import reference_logits
from plugins.kv_quantization import INT4
from tests.cpu.model_defs.test_rotations import session_logits, session_of, tokens_of
from tests.support.models.checkpoints import SMALL, load_weights, make_checkpoint
from tests.support.rounding import assert_near, config_of, model_error
from tests.support.sessions.eager import eager_session

THREE_DIGITS = 1e-3
"""What is published of the sizes."""
EXPERTS, HIDDEN, INNER = SMALL["num_local_experts"], SMALL["hidden_size"], SMALL["intermediate_size"]
SHAPES = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def numbers(*shape: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of ``shape`` numbers, most of them between 2^-6 and 6."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape[:-1], shape[-1] // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(122, 128, blocks.shape[:-1], generator=generator, dtype=torch.uint8)


def test_mxfp4_is_read_as_transformers_reads_it() -> None:
    blocks, scales = numbers(3, 10, 128, seed=0)
    scales[0] = torch.randint(1, 252, scales[0].shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(dequantize_mxfp4(blocks, scales), wanted.mT)
    one = dequantize_mxfp4(torch.tensor([[0x21, 0x7F] + [0] * 14], dtype=torch.uint8), torch.tensor([128]).byte())
    assert one[:4].tolist() == [1.0, 2.0, -12.0, 12.0]


def plain_and_mxfp4(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A checkpoint in bf16, and one with its experts' weights in MXFP4 and their scales in a file of their own."""
    model = {"num_hidden_layers": 3, "sliding_window": 24, **changes}
    path = make_checkpoint(folder / "plain", "gpt_oss", dtype=torch.bfloat16, **model)
    packed = make_checkpoint(folder / "mxfp4", "gpt_oss", dtype=torch.bfloat16, **model)
    tensors, scales_of = load_file(path / "model.safetensors"), {}
    stored = dict(tensors)
    for seed, name in enumerate(sorted(tensors)):
        if (shape := SHAPES.get(name.rpartition(".")[2])) is not None:
            blocks, scales = numbers(EXPERTS, *shape, seed=seed)
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
            stored[f"{name}_blocks"], scales_of[f"{name}_scales"] = blocks, scales
            del stored[name]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (packed / "model.safetensors").unlink()
    save_file(stored, packed / "model-1.safetensors", {"format": "pt"})
    save_file(scales_of, packed / "model-2.safetensors", {"format": "pt"})
    set_config(packed, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return path, packed


def set_config(path: Path, **changes: Any) -> None:
    hf = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(hf | changes))


def test_weights_are_equal_however_they_are_stored(tmp_path: Path) -> None:
    """By the names of a checkpoint that has them one by one, rewired ones among them."""
    plain, packed = plain_and_mxfp4(tmp_path)
    ours, wanted = open_model(packed), load_weights(plain)
    check_weights(ours, read_model_config(ours))
    assert ours.quantization is None and set(ours.file_of_tensor) == set(wanted)
    assert {packed / "model-1.safetensors", packed / "model-2.safetensors"} <= set(ours.files())
    for name, tensor in wanted.items():
        assert ours.layout(name) == (tuple(tensor.shape), "BF16")
        assert torch.equal(ours.read(name, tuple(tensor.shape)), tensor), name
        assert torch.equal(open_model(plain).read_raw(name), tensor), name
    for path in (plain, packed):
        rewire_checkpoint(path, path.parent / f"{path.name}-rewired", RewireOptions(cut=2))
    rewired = [load_file(tmp_path / f"{name}-rewired" / "model.safetensors") for name in ("plain", "mxfp4")]
    assert rewired[0].keys() == rewired[1].keys()
    assert all(torch.equal(rewired[0][name], rewired[1][name]) for name in rewired[0])
    assert "quantization_config" not in json.loads((tmp_path / "mxfp4-rewired" / "config.json").read_text())


def test_a_rewired_model_is_the_reference_and_is_distilled(tmp_path: Path) -> None:
    _, packed = plain_and_mxfp4(tmp_path, num_hidden_layers=4)
    path = tmp_path / "rewired"
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog, 0123456789 times; who counts? " * 40)
    options = RewireOptions(cut=2, group_size=2, init="ridge", num_samples=4, num_tokens=48)
    rewire_checkpoint(packed, path, options, calibration=tmp_path / "text")
    checkpoint, config = open_model(path), config_of(path)
    wide = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    model = load_model(checkpoint, config, torch.float32, with_teacher=True)
    ids = torch.randint(3, 320, (60,), generator=torch.Generator().manual_seed(1))
    layout, source = make_layout(config, 60), config_of(packed)
    with torch.no_grad():
        student = model(ids[None])[0]
        teacher = model.head(model.model.upper(model.model.lower(ids[None], layout), layout, teacher=True)[0])[0]
    assert_near(student, reference_logits(config, wide, ids), model_error(config, 60))
    assert_near(teacher, reference_logits(source, wide, ids), model_error(source, 60))
    (tmp_path / "samples.jsonl").write_text(json.dumps({"text": "abcd" * 40}) + "\n")
    arguments = ["--data", tmp_path / "samples.jsonl", "--work", tmp_path / "work", "--max-steps", 1, "--length", 32]
    assert main(["distill", str(path), str(tmp_path / "distilled"), *map(str, arguments)]) == 0
    assert config_of(tmp_path / "distilled") == config
    name = "model.layers.3.self_attn.sinks"
    after = load_file(tmp_path / "distilled" / "model.safetensors")
    assert torch.equal(after[name], checkpoint.read_raw(name))
    name = "model.layers.2.self_attn.k_proj_swiftkv.weight"
    assert not torch.equal(after[name], checkpoint.read_raw(name))


@pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    [("fp8", torch.float8_e4m3fn), ("int8", torch.int8), ("int4", INT4), ("k8v4", (torch.int8, INT4))],
)
def test_sinks_beside_caches_of_fewer_bits(
    kv_dtype: str, dtype: torch.dtype | tuple[torch.dtype, torch.dtype], tmp_path: Path
) -> None:
    """float32's error may turn a rounding now and then, which is a small part of what the format itself changes."""
    path = make_checkpoint(tmp_path / "model", "gpt_oss", cut=2, group_size=2, sliding_window=24, swiglu_limit=0.7)
    session = eager_session(path, BuildOptions(page_size=8, max_num_tokens=256, kv_dtype=kv_dtype))
    tokens, config, weights = tokens_of(session), config_of(path), load_weights(path)
    exact = reference_logits(config, weights, torch.tensor(tokens))
    rotates = session.options.rotates_keys
    wanted = reference_logits(config, weights, torch.tensor(tokens), dtype, rotates_keys=rotates)
    effect = (wanted - exact).square().mean().sqrt()
    for chunk in (7, 64):
        error = (session_logits(session, tokens, chunk) - wanted).square().mean().sqrt()
        assert 0 < error < effect / 20, chunk


def test_weights_in_4_bits_are_those_of_the_experts(tmp_path: Path) -> None:
    _, packed = plain_and_mxfp4(tmp_path)
    quantize_checkpoint(packed, tmp_path / "int4", "int4", num_samples=2, num_tokens=400)
    written = open_model(tmp_path / "int4")
    check_weights(written, read_model_config(written))
    assert written.has_codes("model.layers.1.mlp.experts.5.up_proj.weight")
    assert not written.has_codes("model.layers.1.mlp.gate.weight")
    session = session_of(tmp_path / "int4")
    tokens = tokens_of(session)
    logits = session_logits(session, tokens, 64)
    assert logits.isfinite().all() and torch.equal(session_logits(session, tokens, 7), logits)


PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


@pytest.mark.parametrize(
    ("layers", "experts", "parameters", "kv_bytes"), [(24, 32, 20.9e9, 49152), (36, 128, 116.8e9, 73728)]
)
def test_the_published_sizes_are_planned(
    layers: int, experts: int, parameters: float, kv_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = {**PUBLISHED, "num_hidden_layers": layers, "num_local_experts": experts}
    hf["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    model = load_subject(str(tmp_path)).model
    assert num_parameters(model) == pytest.approx(parameters, rel=THREE_DIGITS)
    assert model.experts is not None and (model.experts.num_experts, model.experts.num_active) == (experts, 4)
    config = load_config(hf)
    assert config.layer_windows == (128, 0) * (layers // 2) and not config.rope.truncate
    assert config.max_position == 131072 and config.eos_token_ids == (200002,)
    assert main(["plan", "--json", "--model", str(tmp_path)]) == 0
    variants = json.loads(capsys.readouterr().out)["variants"]
    assert variants[0]["kv_bytes_per_token"] == kv_bytes
    assert variants[-1]["kv_bytes_per_token"] < kv_bytes


def test_damaged_stacks_are_refused(tmp_path: Path) -> None:
    _, packed = plain_and_mxfp4(tmp_path, num_hidden_layers=2)
    file, scales_file = packed / "model-1.safetensors", packed / "model-2.safetensors"
    stored, scales = load_file(file), load_file(scales_file)
    name = "model.layers.1.mlp.experts.down_proj"
    cases = (
        ({}, [f"{name}_scales"], "is missing"),
        ({f"{name}_scales": scales[f"{name}_scales"][:, :-1]}, [], "are no weights in MXFP4"),
        ({f"{name}_blocks": stored[f"{name}_blocks"][..., :8]}, [], "are no weights in MXFP4"),
        ({f"{name}_blocks": stored[f"{name}_blocks"][:-1]}, [], "the first of the 8 experts of config.json"),
        ({f"{name}_bias": stored[f"{name}_bias"][0]}, [], "it must have 2 dimensions"),
        ({name: torch.zeros(EXPERTS, INNER, HIDDEN)}, [], "are the same part of the model"),
        ({f"{name}_blocks": stored[f"{name}_blocks"][:, :-1], f"{name}_scales": scales[f"{name}_scales"][:, :-1]}, [],
         "config and weights do not belong together"),
    )  # fmt: skip
    for changed, lacking, sentence in cases:
        everything = {**stored, **scales, **changed}
        save_file({key: x.contiguous() for key, x in everything.items() if key not in lacking}, file)
        save_file({"unused": torch.zeros(1)}, scales_file)
        with pytest.raises(CheckpointError) as error:
            checkpoint = open_model(packed)
            check_weights(checkpoint, read_model_config(checkpoint))
        assert sentence in str(error.value) and str(error.value).endswith(".")


def test_what_has_no_stacks_has_no_mxfp4(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    set_config(path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match="MXFP4, which llama models are not read with"):
        open_model(path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target": "cuda"}, "gpt_oss (a mixture of experts) needs --target cpu, but with target cuda"),
        ({"target": "tensorrt"}, "gpt_oss (a mixture of experts) needs --target cpu, but with target tensorrt"),
        ({"kv_dtype": "kivi2", "dtype": "bfloat16"}, "sinks"),
        ({"kv_policy": "quest:budget=64,chunk_size=16"}, "sliding"),
        ({"kv_policy": "h2o:budget=64"}, "sliding"),
    ],
)
def test_what_engines_with_sinks_do_not_have_is_refused(options: dict[str, str], sentence: str) -> None:
    config = load_config({**SMALL, "model_type": "gpt_oss"})
    with pytest.raises((BuildError, ValueError)) as error:
        resolve(BuildOptions(**options), config, "F32")
    print(error.value)
    assert sentence in str(error.value) and str(error.value).endswith(".")
