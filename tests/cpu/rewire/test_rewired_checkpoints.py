"""What ``kvforge rewire`` writes, against its source, transformers and the reference."""

import dataclasses
import json
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
import transformers
from torch import Tensor

from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.model import check_weights, open_model
from kvforge.compiler import BuildOptions, build_engine
from kvforge.rewire import INITS, RewireOptions, rewire_checkpoint
from kvforge.swiftkv import load_model, make_layout
from model_defs import families, load_config
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import FAMILIES, WITH_HEADS, load_weights, make_checkpoint
from tests.support.rounding import assert_near, assert_within, linear_bound, model_error

IDS = torch.randint(3, 250, (29,), generator=torch.Generator().manual_seed(0))
TEXT = "The quick brown fox jumps over the lazy dog, 0123456789 times; who counts? " * 40
OPTIONS = RewireOptions(cut=3, group_size=2, num_samples=12, num_tokens=64)
LAYERS = {"num_hidden_layers": 6}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def opened(path: Path):
    """Return checkpoint and configuration; every tensor that an engine needs is there."""
    checkpoint = open_model(path)
    config = load_config(checkpoint.hf_config, checkpoint.generation_config)
    check_weights(checkpoint, config)
    return checkpoint, config


@pytest.mark.parametrize("family", WITH_HEADS)
@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(family: str, tied: bool, tmp_path: Path) -> None:
    """A ragged last group, shards in and out, teacher kept: the source is all there, and the model is whole."""
    source = make_checkpoint(
        tmp_path / "source",
        family,
        dtype=torch.bfloat16,
        max_shard_size="200KB",
        tie_word_embeddings=tied,
        **LAYERS,
    )
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (source / "LICENSE").write_text("terms")
    options = dataclasses.replace(OPTIONS, init="mean", early_exit=True, max_shard_bytes=150_000)
    summary = rewire_checkpoint(source, tmp_path / "out", options)
    checkpoint, config = opened(tmp_path / "out")
    assert len(set(checkpoint.file_of_tensor.values())) > 2
    assert (config.cut, config.group_size, config.upper_owners, config.early_exit) == (3, 2, (3, 5), True)
    assert config.eos_token_ids == (2, 7)
    hf, original = checkpoint.hf_config, json.loads((source / "config.json").read_text())
    assert hf["architectures"] == [f"{original['architectures'][0].removesuffix('ForCausalLM')}SwiftKVForCausalLM"]
    assert hf["model_type"] == f"{family}_swiftkv" and hf["swiftkv"] is True
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    old, new = load_weights(source), load_weights(tmp_path / "out")
    assert all(torch.equal(new[name], tensor) and new[name].dtype == tensor.dtype for name, tensor in old.items())
    added = {name: tensor for name, tensor in new.items() if name not in old}
    assert {tensor.dtype for tensor in added.values()} == {torch.bfloat16}
    assert summary.new_parameters == sum(tensor.numel() for tensor in added.values())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == summary.weight_bytes == sum(t.nbytes for t in new.values())
    assert {name: (tmp_path / "out" / file) for name, file in index["weight_map"].items()} == checkpoint.file_of_tensor
    for layer in range(3, 6):
        assert torch.equal(
            added[f"model.layers.{layer}.self_attn.q_proj_swiftkv.weight"],
            old[f"model.layers.{layer}.self_attn.q_proj.weight"],
        )
    pair = [old[f"model.layers.{layer}.self_attn.v_proj.weight"].double() for layer in (3, 4)]
    assert torch.equal(added["model.layers.3.self_attn.v_proj_swiftkv.weight"], ((pair[0] + pair[1]) / 2).bfloat16())
    assert torch.equal(
        added["model.layers.5.self_attn.k_proj_swiftkv.weight"], old["model.layers.5.self_attn.k_proj.weight"]
    )
    assert "model.layers.4.self_attn.k_proj_swiftkv.weight" not in added
    norms = added.get("model.norm_swiftkv.weight"), old.get("model.layers.3.input_layernorm.weight")
    assert norms == (None, None) or torch.equal(*norms)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(added["lm_head_early_exit.weight"], old[head])
    assert torch.equal(added["model.norm_early_exit.weight"], old["model.norm.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_teacher_is_the_source_and_student_the_reference(family: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", family, **LAYERS)
    rewire_checkpoint(source, tmp_path / "out", dataclasses.replace(OPTIONS, init="copy"))
    checkpoint, config = opened(tmp_path / "out")
    model = load_model(checkpoint, config, torch.float32, with_teacher=True)
    hf = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    layout = make_layout(config, len(IDS))
    with torch.no_grad():
        hidden = model.model.lower(IDS[None], layout)
        teacher = model.head(model.model.upper(hidden, layout, teacher=True)[0])
        assert_near(teacher, hf(IDS[None]).logits, model_error(config, len(IDS)))
        student = model(IDS[None])[0]
    expected = reference_logits(config, load_weights(tmp_path / "out"), IDS)
    assert_near(student, expected, model_error(config, len(IDS)))
    assert (student - teacher[0]).abs().max() > 0.01


@pytest.mark.parametrize("family", WITH_HEADS)
@pytest.mark.parametrize("init", INITS)
def test_a_cut_at_the_last_layer_loses_nothing(family: str, init: str, tmp_path: Path, text: Path) -> None:
    """There the single input is the layer's own, so every init must give back the model that transformers runs."""
    source = make_checkpoint(tmp_path / "source", family, num_hidden_layers=3, attention_bias=family == "llama")
    options = dataclasses.replace(OPTIONS, cut=2, init=init, drop_teacher=True)
    rewire_checkpoint(source, tmp_path / "out", options, calibration=text)
    checkpoint, config = opened(tmp_path / "out")
    assert not [name for name in checkpoint.file_of_tensor if name.startswith("model.layers.2.self_attn.k_proj.")]
    hf = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    with torch.no_grad():
        logits = load_model(checkpoint, config, torch.float32)(IDS[None])
        assert_near(logits, hf(IDS[None]).logits, model_error(config, len(IDS)))


@pytest.mark.parametrize("family", [name for name in WITH_HEADS if families()[name].traits.get("pre_norms", True)])
def test_fold_is_exact_on_equal_inputs(family: str, tmp_path: Path) -> None:
    """K and V of every layer above the cut are what the layer's own norm and projection make of the same hidden state;
    gains of zero included."""
    source = make_checkpoint(tmp_path / "source", family, **LAYERS)
    weights = load_weights(source)
    offset = opened(source)[1].norm_offset
    weights["model.layers.3.input_layernorm.weight"][::5] = -offset
    rewrite(source, weights)
    rewire_checkpoint(source, tmp_path / "out", dataclasses.replace(OPTIONS, group_size=1, init="fold"))
    new = load_weights(tmp_path / "out")
    hidden = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)) * 3
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + opened(source)[1].rms_norm_eps)
    single = normed * (new["model.norm_swiftkv.weight"] + offset)
    for layer in range(3, 6):
        own = normed * (weights[f"model.layers.{layer}.input_layernorm.weight"] + offset)
        for part in ("k", "v"):
            name = f"model.layers.{layer}.self_attn.{part}_proj"
            bias = new.get(f"{name}_swiftkv.bias", torch.zeros(()))
            folded, found = new[f"{name}_swiftkv.weight"], weights.get(f"{name}.bias", torch.zeros(()))
            expected = own @ weights[f"{name}.weight"].T + found
            # A gain is divided out of one and multiplied into the other.
            assert_within(single @ folded.T + bias, expected, linear_bound(single, folded, bias, roundings=4))


def rewrite(path: Path, weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def test_tensors_that_no_model_needs_are_kept(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama")
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8),
        "step": torch.tensor(3),
        "empty": torch.ones(0),
    }
    rewrite(source, load_weights(source) | extra)
    rewire_checkpoint(source, tmp_path / "out", dataclasses.replace(OPTIONS, cut=2))
    new = load_weights(tmp_path / "out")
    assert all(torch.equal(new[name], tensor) and new[name].dtype == tensor.dtype for name, tensor in extra.items())


def test_dropping_the_teacher_leaves_what_an_engine_reads(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3", attention_bias=True, **LAYERS)
    options = dataclasses.replace(OPTIONS, drop_teacher=True)
    rewire_checkpoint(source, tmp_path / "out", options)
    _, config = opened(tmp_path / "out")
    old, new = load_weights(source), load_weights(tmp_path / "out")
    parts = [f"{part}.{kind}" for part in ("q_proj", "k_proj", "v_proj") for kind in ("weight", "bias")]
    gone = [f"model.layers.{i}.self_attn.{p}" for i in (3, 4, 5) for p in (*parts, "q_norm.weight", "k_norm.weight")]
    assert set(old) - set(new) == set(gone)
    assert torch.isfinite(reference_logits(config, new, IDS)).all()


@pytest.mark.parametrize("init", ["fold", "ridge"])
def test_few_tensors_are_in_memory_at_a_time(init: str, tmp_path: Path, text: Path, monkeypatch) -> None:
    """The source's tensors are let go one by one, however many layers there are."""
    source = make_checkpoint(tmp_path / "source", "llama", num_hidden_layers=8)
    alive: WeakSet[Tensor] = WeakSet()
    most = 0
    read_raw = Checkpoint.read_raw

    def counted(checkpoint: Checkpoint, name: str, **more: bool) -> Tensor:
        nonlocal most
        tensor = read_raw(checkpoint, name, **more)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(Checkpoint, "read_raw", counted)
    rewire_checkpoint(source, tmp_path / "out", dataclasses.replace(OPTIONS, init=init), calibration=text)
    one_layer = 9
    assert most <= (one_layer if init == "ridge" else 2)


def test_an_engine_is_built_from_it(tmp_path: Path, full: bool) -> None:
    if not full:
        pytest.skip("compiles a model: --full")
    source = make_checkpoint(tmp_path / "source", "qwen2", **LAYERS)
    rewire_checkpoint(source, tmp_path / "out", dataclasses.replace(OPTIONS, early_exit=True))
    manifest = build_engine(tmp_path / "out", tmp_path / "engine", BuildOptions(page_size=8, max_num_tokens=256))
    assert (manifest.model.cut, manifest.model.owners) == (3, (0, 1, 2, 3, 5))
