"""Heads that are published, and those that are not for the model or not whole, each refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.checkpoint.draft_head import open_draft_head, tokens_of
from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.checkpoint.text_part import what_is_left_out
from kvforge.common.errors import BuildError, CheckpointError, EngineError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.manifest import load_manifest, save_manifest
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.runtime import LLMEngine
from kvforge.runtime.speculation.config import SpeculativeConfig
from model_defs.config_keys import is_of_mtp
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.draft_heads import add_mtp, make_head
from tests.support.models.multimodal import PREFIXES, make_multimodal
from tests.support.sessions.eager import eager_session
from tests.support.sessions.fake import FakeSession, fake_manifest

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "target", num_hidden_layers=8)


def opened(path: Path, target: Path):
    checkpoint = open_model(target)
    return open_draft_head(path, checkpoint, read_model_config(checkpoint))


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    weights = load_file(path / "model.safetensors") | tensors
    save_file({k: v for k, v in weights.items() if v is not None}, path / "model.safetensors")


def test_where_a_head_reads(tmp_path: Path, target: Path) -> None:
    """The layers whose incoming streams it reads: as vLLM counts them, as SGLang does, and those of no names."""
    for index, (fields, layers) in enumerate([
        ({IDS: [1, 4, 8]}, (1, 4, 8)),
        ({"eagle_config": {IDS: [0, 3, 7]}}, (1, 4, 8)),
        ({"eagle_config": {IDS: []}}, (2, 4, 5)),
        ({}, (2, 4, 5)),
    ]):  # fmt: skip
        assert opened(make_head(tmp_path / str(index), target, **fields), target)[1].layers == layers


def test_what_a_head_has(tmp_path: Path, target: Path) -> None:
    path = make_head(tmp_path / "head", target)
    checkpoint, head = opened(path, target)
    d2t = load_file(path / "model.safetensors")["d2t"]
    assert tokens_of(checkpoint, head).tolist() == (d2t + torch.arange(50)).tolist()
    assert (head.draft_vocab, head.own_embedding, head.norm_before_residual) == (50, False, False)
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    change(path, **{"embed_tokens.weight": table})
    assert not opened(path, target)[1].own_embedding
    change(path, **{"embed_tokens.weight": table + 1})
    assert opened(path, target)[1].own_embedding


def test_the_form_of_speculators(tmp_path: Path, target: Path) -> None:
    path = make_head(tmp_path / "head", target)
    layer = json.loads((path / "config.json").read_text())
    own = {"draft_vocab_size": layer.pop("draft_vocab_size"), "speculators_model_type": "eagle3", IDS: [2, 3, 4]}
    (path / "config.json").write_text(json.dumps(own | {"transformer_layer_config": layer}))
    head = opened(path, target)[1]
    assert head.norm_before_residual and head.layers == (2, 3, 4) and head.draft_vocab == 50
    assert head.model.rope.theta == 5000.0


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"target_hidden_size": 128}, {}, "target_hidden_size is 128 in config.json, and 64 is that of the model"),
        ({"vocab_size": 321}, {}, "vocab_size is 321 in config.json, and 320 is that of the model"),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2 in config.json, and 1 is a head of one layer"),
        ({"logit_scale": 0.5}, {}, "logit_scale is 0.5"),
        ({"draft_vocab_size": 321}, {}, "draft_vocab_size is 321 in config.json, and the model has 320"),
        ({"draft_vocab_size": "many"}, {}, "draft_vocab_size is 'many'"),
        ({IDS: [1, 2, 9]}, {}, "it must be 3 of the 8 layers of the model"),
        ({IDS: [1, 2]}, {}, "it must be 3 of the 8 layers"),
        ({"eagle_config": {IDS: [1, 2, 8]}}, {}, "it must be 3 of the 8 layers"),
        ({IDS: "1,2,3"}, {}, "it must be 3 of the 8 layers"),
        ({"hidden_size": 32}, {}, "has no embed_tokens.weight, and its hidden_size 32 is not the 64 of the model"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu' is not supported"),
        ({}, {"fc.weight": None}, "is no EAGLE-3 head: it has no tensor fc.weight"),
        ({}, {"fc.weight": torch.ones(64, 64)}, r"fc.weight in .* has shape \[64, 64\]"),
        ({}, {"midlayer.hidden_norm.weight": None}, "layers.0.hidden_norm.weight is missing"),
        ({}, {"midlayer.self_attn.q_proj.bias": torch.ones(64)}, "has the tensor layers.0.self_attn.q_proj.bias"),
        ({}, {"layers.1.mlp.up_proj.weight": torch.ones(2)}, "has the tensor layers.1.mlp.up_proj.weight"),
        ({}, {"d2t": None}, "has 50 tokens of 320 and no d2t"),
        ({}, {"d2t": torch.zeros(49, dtype=torch.int64)}, "d2t in .* must be one whole number for each"),
        ({}, {"d2t": torch.zeros(50)}, "d2t in .* must be one whole number for each"),
        ({}, {"d2t": torch.full((50,), 300)}, "d2t in .* leads to tokens outside the 320"),
    ],
)
def test_refused(tmp_path: Path, target: Path, fields: dict, tensors: dict, message: str) -> None:
    path = make_head(tmp_path / "head", target, **fields)
    change(path, **tensors)
    with pytest.raises(CheckpointError, match=message):
        opened(path, target)


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        (
            {"num_nextn_predict_layers": 0},
            {},
            "has 0 modules .* by num_nextn_predict_layers .* that have 1",
        ),
        ({"num_nextn_predict_layers": None}, {}, "has 0 modules"),
        ({"num_nextn_predict_layers": 2}, {}, "has 2 modules"),
        ({"num_nextn_predict_layers": "1"}, {}, "has '1' modules"),
        ({}, {"hnorm.weight": None}, r"has no model.layers.4.hnorm.weight, .* give the published checkpoint"),
        ({}, {"mlp.experts.7.up_proj.weight": None}, "has no model.layers.4.mlp.experts.7.up_proj.weight"),
        ({}, {"eh_proj.weight": torch.ones(64, 64)}, r"model.layers.4.eh_proj.weight in .* \[64, 64\].* \[64, 128\]"),
        ({}, {"shared_head.head.weight": torch.ones(9, 64)}, "model.layers.4.shared_head.head.weight in .* has shape"),
        ({}, {"self_attn.o_proj.bias": torch.ones(64)}, "has model.layers.4.self_attn.o_proj.bias, which config.json"),
        ({}, {"enorm.weight": torch.full((64,), torch.nan)}, "model.layers.4.enorm.weight"),
    ],
)
def test_modules_that_are_refused(tmp_path: Path, fields: dict, tensors: dict, message: str) -> None:
    path = add_mtp(make_checkpoint(tmp_path / "target", "glm4_moe"))
    change(path, **{f"model.layers.4.{name}": tensor for name, tensor in tensors.items()})
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as caught:
        eager_session(path, BuildOptions(draft_head="mtp", max_draft_len=2, max_seq_len=64))
    assert str(caught.value).count("\n") == 0


def test_a_module_of_another_checkpoint(tmp_path: Path, target: Path) -> None:
    """So one goes with a model that was cut, which is written without it; the model's norm and head are its own."""
    full = add_mtp(make_checkpoint(tmp_path / "full", "glm4_moe"), leave_out="[.]head")
    cut = make_checkpoint(tmp_path / "cut", "glm4_moe", cut=2, seed=1)
    options = BuildOptions(draft_head=str(full), max_draft_len=2, max_seq_len=64)
    session, stored = eager_session(cut, options), load_file(cut / "model.safetensors")
    assert torch.equal(session._weights["draft.final_norm.weight"], stored["model.norm.weight"])
    assert not session.manifest.draft_head.own_lm_head and not session.manifest.draft_head.reads_below(session.config)
    hnorm = load_file(full / "model.safetensors")["model.layers.4.hnorm.weight"]
    assert torch.equal(session._weights["draft.hidden_norm.weight"], hnorm)
    other = add_mtp(make_checkpoint(tmp_path / "other", "glm4_moe", num_hidden_layers=3))
    for path, head, message in (
        (cut, str(other), "is of type glm4_moe with 3 layers, .* for no glm4_moe with 4; leave --draft-head out"),
        (cut, "mtp", "has no model.layers.4.enorm.weight"),
        (target, "mtp", "llama models carry no module for multi"),
        (target, str(full), "llama models carry no module for multi"),
    ):
        with pytest.raises(CheckpointError, match=message):
            eager_session(path, dataclasses.replace(options, draft_head=head))


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_module_beside_parts_for_images(model_type: str, prefix: str, tmp_path: Path) -> None:
    """Published ones have it at the top, whatever is before the names of the text model."""
    path = add_mtp(make_multimodal(tmp_path / "target", model_type, prefix))
    session = eager_session(path, BuildOptions(draft_head="mtp", max_draft_len=2, max_seq_len=64))
    stored = load_file(path / "model.safetensors")
    assert torch.equal(session._weights["draft.projection.weight"], stored["mtp.fc.weight"])
    norm = stored[f"{prefix}norm.weight"] + session.config.norm_offset
    assert torch.equal(session._weights["draft.final_norm.weight"], norm)
    assert not any("mtp" in name for name in open_model(path).file_of_tensor)
    images = f"of {path} the text model is read; images and audio are not served"
    assert what_is_left_out(path, takes_mtp=True) == images
    assert what_is_left_out(path) == f"{images}, and mtp for multi-token prediction is left out"
    rewire_checkpoint(path, cut := tmp_path / "cut", RewireOptions(cut=2, init="copy"))
    session = eager_session(cut, BuildOptions(draft_head=str(path), max_draft_len=2, max_seq_len=64))
    assert torch.equal(session._weights["draft.projection.weight"], stored["mtp.fc.weight"])
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(CheckpointError, match=r"text_config is None in config.json; .* needs an object"):
        eager_session(cut, BuildOptions(draft_head=str(path), max_draft_len=2, max_seq_len=64))


def test_a_model_that_was_cut_speaks_of_no_module(tmp_path: Path) -> None:
    """It is written without, and says so; the plain one's module still fits it."""
    full, cut = add_mtp(make_checkpoint(tmp_path / "full", "glm4_moe")), tmp_path / "cut"
    of_modules = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    config = json.loads((full / "config.json").read_text()) | of_modules
    (full / "config.json").write_text(json.dumps(config))
    rewire_checkpoint(full, cut, RewireOptions(cut=2, init="copy"))
    written = json.loads((cut / "config.json").read_text())
    assert written["num_hidden_layers"] == 4 and not any(map(is_of_mtp, written))
    options = BuildOptions(draft_head="mtp", max_draft_len=2, max_seq_len=64)
    with pytest.raises(CheckpointError, match=r"has 0 modules for .*; give the published checkpoint as"):
        eager_session(cut, options)
    assert eager_session(cut, dataclasses.replace(options, draft_head=str(full))).manifest.draft_head.kind == "mtp"


def test_engines_that_cannot_are_refused(tmp_path: Path, target: Path) -> None:
    options = {"draft_head": str(make_head(tmp_path / "head", target)), "max_seq_len": 64}
    for more, message in (
        ({}, "--draft-head drafts tokens, and the engine is to verify none; give --max-draft-len too"),
        ({"target": "cuda"}, "draft head needs --target cpu, but with target cuda"),
        ({"target": "vllm", "max_draft_len": 0}, "--draft-head is for an engine of kvforge's own"),
        ({"kv_policy": "snapkv"}, "snapkv needs one query per sequence and step, but with speculation"),
        ({"kv_dtype": "kivi2"}, "kivi2 needs groups of tokens that are complete, but with draft head"),
    ):
        drafts = {"max_draft_len": 4 if more else 0}
        with pytest.raises(BuildError, match=message):
            build_engine(target, tmp_path / "engine", BuildOptions(**options | drafts | more))
    for method in ("eagle3", "mtp"):
        with pytest.raises(
            EngineError, match=r"has no draft head; .* --draft-head HEAD .* or mtp for the checkpoint's"
        ):
            LLMEngine(session=FakeSession(max_draft_len=4), num_pages=20, speculative=SpeculativeConfig(method))
    head = opened(tmp_path / "head", target)[1]
    with pytest.raises(EngineError, match="mtp needs a draft head of that kind, and the engine's is for eagle3"):
        LLMEngine(session=FakeSession(max_draft_len=4, draft_head=head), speculative=SpeculativeConfig("mtp"))


def test_a_manifest_says_what_head_there_is(tmp_path: Path, target: Path) -> None:
    head = opened(make_head(tmp_path / "head", target), target)[1]
    model = read_model_config(open_model(target))
    good = dataclasses.replace(fake_manifest(model=model, max_draft_len=2, draft_head=head), isa=("x86_64",))
    folder = tmp_path / "engine"
    folder.mkdir()
    save_manifest(good, folder)
    assert load_manifest(folder).draft_head == head
    for wrong in (
        {"max_draft_len": 0},
        {"draft_head": dataclasses.replace(head, layers=(1, 2, 9))},
        {"draft_head": dataclasses.replace(head, kind="mtp")},
        {"draft_head": dataclasses.replace(head, own_lm_head=False)},
        {"draft_head": dataclasses.replace(head, draft_vocab=321)},
        {"draft_head": dataclasses.replace(head, model=dataclasses.replace(head.model, hidden_size=32))},
    ):
        save_manifest(dataclasses.replace(good, **wrong), folder)
        with pytest.raises(EngineError, match="holds impossible values"):
            load_manifest(folder)
