"""From a plain checkpoint through rewiring and distillation to an engine that computes what was trained."""

import json
from pathlib import Path

import pytest
import torch

from kvforge.checkpoint import open_checkpoint
from kvforge.compiler import BuildOptions, build_engine
from kvforge.distill import DistillConfig, distill_checkpoint
from kvforge.manifest import load_manifest
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.runtime.sessions.session import load_session
from kvforge.swiftkv import load_model, make_layout
from model_defs import load_config
from tests.support.models.checkpoints import make_checkpoint
from tests.support.rounding import assert_near, model_error
from tests.support.schedules.packed_steps import packed_steps

CONFIG = DistillConfig(train="full", length=48, batch_size=4, max_steps=3, lr=1e-2, dtype="fp32", device="cpu")


def test_the_engine_has_the_logits_of_the_trained_module(tmp_path: Path, full: bool) -> None:
    """All weights trained, tied embeddings, a ragged last group, and an early exit whose head is not tied."""
    if not full:
        pytest.skip("compiles a model: --full")
    plain = make_checkpoint(tmp_path / "plain", "qwen3", num_hidden_layers=5, tie_word_embeddings=True)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"after {i} comes {i + 1}"}) + "\n" for i in range(20)))
    options = RewireOptions(2, group_size=2, init="ridge", early_exit=True, num_samples=8, num_tokens=256)
    rewire_checkpoint(plain, tmp_path / "rewired", options)
    distill_checkpoint(tmp_path / "rewired", tmp_path / "distilled", data, CONFIG)
    build_engine(tmp_path / "distilled", tmp_path / "engine", BuildOptions(page_size=8, max_num_tokens=256))
    checkpoint = open_checkpoint(tmp_path / "distilled")
    assert "lm_head.weight" not in checkpoint.file_of_tensor
    model = load_model(checkpoint, load_config(checkpoint.hf_config), torch.float32)
    ids = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layout = make_layout(model.sizes, len(ids))
        hidden = model.model.lower(ids[None], layout)
        logits = model.head(model.model.upper(hidden, layout)[0])[0]
        exits = model.early_exit_logits(hidden)[0]
    assert (logits - exits).abs().max() > 0.1

    session = load_session(tmp_path / "engine", load_manifest(tmp_path / "engine"))
    pools = session.allocate_pools(16)
    compared, rounding = 0, model_error(model.sizes, len(ids))
    for step in packed_steps([ids.tolist()], session.manifest.page_size, 16, 0):
        state = session.lower(step.lower, pools)
        if step.survivors:
            positions = [position for _, position in step.survivors]
            compared += len(positions)
            assert_near(session.early_exit(state, step.survivor_index), exits[positions], rounding)
            assert_near(session.upper(step.upper(state), pools), logits[positions], rounding)
    assert compared > 5
