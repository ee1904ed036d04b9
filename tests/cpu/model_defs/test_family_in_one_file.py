"""A family defined outside the product, in one file, is built, planned, rewired, distilled and quantized like any
other. What it should compute is said by the plain reference, on tensors named here by hand."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvforge.checkpoint import kv_scales
from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.cli import main
from kvforge.common.errors import CheckpointError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.runtime import LLM, SamplingParams
from kvforge.swiftkv import load_model, make_layout
from model_defs import ModelConfig, families
from model_defs.reference import reference_logits
from tests.support.extensions.novel_family import FAMILY
from tests.support.models.checkpoints import write_byte_tokenizer
from tests.support.rounding import assert_near, model_error

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, WINDOW = 5, 64, 96, 4, 2, 16, 320, 9
CONFIG: dict[str, Any] = {
    "architectures": ["NovelForCausalLM"], "model_type": "novel", "vocab_size": VOCAB, "n_layer": LAYERS,
    "d_model": HIDDEN, "d_ff": INNER, "n_head": HEADS, "n_kv_head": KV_HEADS, "d_head": HEAD_DIM, "n_ctx": 256,
    "norm_eps": 1e-5, "rope_base": 5000.0, "local_window": WINDOW, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPTIONS = BuildOptions(page_size=8, max_num_tokens=128, max_num_seqs=4)
REWIRE = RewireOptions(cut=2, group_size=2, init="ridge", num_samples=8, num_tokens=48)
PROMPTS = [[5 + (7 * index * index + seed) % 300 for index in range(length)] for seed, length in ((0, 40), (3, 5))]
TEXT = "The quick brown fox jumps over the lazy dog, 0123456789 times; who counts? " * 40
PART_NAMES = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn.wq": ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
    "attn.wk": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn.wv": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn.q_gain": ("self_attn.q_norm", (HEAD_DIM,)),
    "attn.k_gain": ("self_attn.k_norm", (HEAD_DIM,)),
    "attn.wo": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn.gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn.up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn.down": ("mlp.down_proj", (HIDDEN, INNER)),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(families(), FAMILY.model_type, FAMILY)


def write_checkpoint(path: Path) -> dict[str, Tensor]:
    """Write a random model under the family's names; returns its tensors under the common ones."""
    generator = torch.Generator().manual_seed(0)
    own: dict[str, Tensor] = {}
    common: dict[str, Tensor] = {}

    def add(name: str, common_name: str, shape: tuple[int, ...], offset: float = 0.0) -> None:
        noise = torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else 0.3)
        own[name] = common[common_name] = offset + noise

    add("tok_embed.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN))
    add("final_norm.weight", "model.norm.weight", (HIDDEN,), 1.0)
    add("output.weight", "lm_head.weight", (VOCAB, HIDDEN))
    for layer in range(LAYERS):
        for name, (common_name, shape) in PART_NAMES.items():
            names = f"blocks.{layer}.{name}", f"model.layers.{layer}.{common_name}"
            add(f"{names[0]}.weight", f"{names[1]}.weight", shape, 1.0 if len(shape) == 1 else 0.0)
            if name in ("attn.wq", "attn.wk", "attn.wv"):
                add(f"{names[0]}.bias", f"{names[1]}.bias", shape[:1])
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(own, path / "model.safetensors")
    write_byte_tokenizer(path, VOCAB)
    return common


def rewired(path: Path, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    common = write_checkpoint(path / "source")
    (path / "text").write_text(TEXT)
    options = dataclasses.replace(REWIRE, **changes)
    rewire_checkpoint(path / "source", path / "rewired", options, calibration=path / "text")
    return path / "rewired", common


def config_of(path: Path) -> ModelConfig:
    checkpoint = open_model(path)
    config = read_model_config(checkpoint)
    check_weights(checkpoint, config)
    return config


def greedy(config: ModelConfig, weights: dict[str, Tensor], prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(config, weights, torch.tensor(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


def assert_generates(engine: Path, config: ModelConfig, weights: dict[str, Tensor]) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    outputs = LLM(engine).generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        wanted = greedy(config, weights, prompt, 16)
        assert list(output.outputs[0].token_ids) == wanted and len(set(wanted)) > 3


def plan(capsys, model: Path) -> list[dict[str, Any]]:
    assert main(["plan", "--json", "--model", str(model)]) == 0
    return json.loads(capsys.readouterr().out)["variants"]


def test_its_config_is_read(tmp_path):
    write_checkpoint(tmp_path / "model")
    config = config_of(tmp_path / "model")
    assert (config.num_layers, config.head_dim, config.rope.theta) == (LAYERS, HEAD_DIM, 5000.0)
    assert config.layer_windows == (WINDOW, WINDOW, 0, WINDOW, WINDOW)
    assert config.qkv_bias and config.qk_norm and not config.output_bias


@pytest.mark.usefixtures("compiled_with_full")
def test_an_engine_is_built_and_planned(tmp_path, capsys):
    """Greedy tokens are the reference's; config.json and engine have one plan."""
    common = write_checkpoint(tmp_path / "model")
    manifest = build_engine(tmp_path / "model", tmp_path / "engine", OPTIONS)
    assert (manifest.model.model_type, manifest.model.qkv_bias, manifest.model.qk_norm) == ("novel", True, True)
    assert_generates(tmp_path / "engine", config_of(tmp_path / "model"), common)
    rows = [plan(capsys, tmp_path / path) for path in ("model", "model/config.json", "engine")]
    sizes = [[(row["name"], row["num_parameters"], row["kv_bytes_per_token"]) for row in plan] for plan in rows]
    assert sizes[0] == sizes[1] == sizes[2]
    assert sizes[0][0][1] == sum(tensor.numel() for tensor in common.values())


def test_it_is_rewired_and_built(tmp_path, capsys):
    """Its K and V projections are fitted, its groups share a cache, and the engine is the reference of what was
    written."""
    path, common = rewired(tmp_path, drop_teacher=True)
    hf = json.loads((path / "config.json").read_text())
    assert (hf["model_type"], hf["architectures"]) == ("novel_swiftkv", ["NovelSwiftKVForCausalLM"])
    config, weights = config_of(path), load_file(path / "model.safetensors")
    assert (config.cut, config.upper_owners) == (2, (2, 4))
    gone = {name for name in common if name not in weights}
    projections = [("q_proj", "weight"), ("q_proj", "bias"), ("k_proj", "weight"), ("k_proj", "bias")]
    projections += [("v_proj", "weight"), ("v_proj", "bias"), ("q_norm", "weight"), ("k_norm", "weight")]
    assert gone == {f"model.layers.{i}.self_attn.{part}.{kind}" for i in (2, 3, 4) for part, kind in projections}
    build_engine(path, tmp_path / "engine", OPTIONS)
    assert_generates(tmp_path / "engine", config, weights)
    row = next(row for row in plan(capsys, tmp_path / "engine") if row["name"] == "cut 2 of 5, 2-way")
    assert row["num_parameters"] == sum(tensor.numel() for tensor in weights.values())


def test_distillation_draws_it_to_its_source(tmp_path):
    """The teacher inside the rewired checkpoint is the source; a step of training writes a checkpoint of the family."""
    path, common = rewired(tmp_path, init="mean")
    checkpoint, source = open_model(path), config_of(tmp_path / "source")
    model = load_model(checkpoint, read_model_config(checkpoint), torch.float32, with_teacher=True)
    ids = torch.tensor([PROMPTS[0]])
    layout = make_layout(model.sizes, ids.shape[1])
    with torch.no_grad():
        teacher = model.head(model.model.upper(model.model.lower(ids, layout), layout, teacher=True)[0])[0]
    assert_near(teacher, reference_logits(source, common, ids[0]), model_error(source, ids.shape[1]))
    (tmp_path / "samples.jsonl").write_text(json.dumps({"text": "abcd" * 40}) + "\n")
    arguments = ["--data", tmp_path / "samples.jsonl", "--work", tmp_path / "work", "--max-steps", 1, "--length", 32]
    assert main(["distill", str(path), str(tmp_path / "distilled"), *map(str, arguments)]) == 0
    assert config_of(tmp_path / "distilled") == model.sizes
    before, after = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "distilled"))
    norm = "model.norm_swiftkv.weight"
    assert not torch.equal(before[norm], after[norm])
    assert torch.equal(after["model.embed_tokens.weight"], common["model.embed_tokens.weight"])


def test_it_is_quantized(tmp_path):
    path, _ = rewired(tmp_path, init="mean", drop_teacher=True)
    output = tmp_path / "quantized"
    arguments = ["--recipe", "fp8-kv", "--calibration", tmp_path / "text", "--num-samples", 2, "--num-tokens", 16]
    assert main(["quantize", str(path), "-o", str(output), *map(str, arguments)]) == 0
    scales = kv_scales(open_model(output), config_of(output))
    assert len(scales) == 4 and all(0 < scale < 1 for pair in scales for scale in pair)


def test_a_tensor_under_both_names_is_refused(tmp_path):
    common = write_checkpoint(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": common["lm_head.weight"]}, file)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and output\.weight .* same part"):
        open_model(tmp_path / "model")
