"""Compiled graphs that select chunks: what AOTInductor makes of them computes what they say, in place."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from kvforge.common.errors import EngineError
from kvforge.manifest import WEIGHTS_FILE, load_manifest
from kvforge.runtime.sessions.session import Session, load_session
from model_defs import load_config
from model_defs.rope import rope_tables
from tests.support.models.engines import SHADOWKV, SWIFTKV, EngineSpec
from tests.support.models.shelf import EngineShelf
from tests.support.rounding import assert_near, config_of, model_error, rounded_model_error
from tests.support.schedules.shadow_steps import STEPS, TOKENS, mixed_steps
from tests.support.sessions.eager import eager_session


def load(engines: EngineShelf, spec: EngineSpec) -> Session:
    path = Path(engines.engine(spec))
    return load_session(path, load_manifest(path))


@pytest.mark.with_full(is_bf16=[True])
@pytest.mark.parametrize("is_bf16", [False, True])
@torch.inference_mode()
def test_logits_are_the_eager_graphs(is_bf16: bool, engines: EngineShelf) -> None:
    spec = dataclasses.replace(SHADOWKV, bfloat16=is_bf16)
    compiled = mixed_steps(load(engines, spec))
    eager = mixed_steps(eager_session(engines.checkpoint(spec), spec.options))
    assert len(compiled) == len(STEPS)
    config = config_of(engines.checkpoint(spec))
    bound = rounded_model_error(config, torch.bfloat16) if is_bf16 else model_error(config, TOKENS)
    for step, (one, other) in enumerate(zip(compiled, eager, strict=True)):
        assert_near(one, other, bound, step)


def test_positions_are_among_the_weights(engines: EngineShelf) -> None:
    """cos and sin of every position that a sequence can have, exactly, and nothing of them in other engines."""
    session = load(engines, SHADOWKV)
    with safe_open(engines.engine(SHADOWKV) / WEIGHTS_FILE, framework="pt") as file:
        tables = tuple(file.get_tensor(name) for name in ("rope_cos", "rope_sin"))
    config = load_config(json.loads((engines.checkpoint(SHADOWKV) / "config.json").read_text()))
    expected = rope_tables(config.rope, config.head_dim, session.manifest.max_seq_len)
    for stored, given, table in zip(tables, session.rope_tables, expected, strict=True):
        assert torch.equal(stored, table) and torch.equal(given, table)
    with pytest.raises(EngineError, match="has no table of positions, which its KV policy needs; rebuild it"):
        _ = load(engines, SWIFTKV).rope_tables
