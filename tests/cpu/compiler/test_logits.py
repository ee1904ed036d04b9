"""Compiled engines against Hugging Face transformers and against the plain all-token reference, fp32."""

import dataclasses
import json
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from kvforge.engine import load_manifest
from kvforge.runtime.session import Session, load_session
from model_defs import load_config
from model_defs.reference import reference_logits
from tests.support.checkpoints import load_weights
from tests.support.engines import SWIFTKV, EngineShelf, EngineSpec
from tests.support.step_driver import StepDriver

PROMPT, DECODED = 100, 32
CHUNKS = (1, 7, 64, PROMPT)
TOLERANCE = 1e-4


def spec(family: str, cut: int | None = None, group_size: int = 1, **model: object) -> EngineSpec:
    return EngineSpec(family, cut, group_size, model=tuple(sorted(model.items())))


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {
    "llama": spec("llama", num_hidden_layers=3, rope_parameters=LLAMA3_ROPE),
    "mistral": spec("mistral", num_hidden_layers=3, sliding_window=24),
    "qwen2": spec("qwen2", num_hidden_layers=3, tie_word_embeddings=True),
    "qwen3": spec("qwen3", num_hidden_layers=3, head_dim=32),
}
REWIRED = {
    "llama": SWIFTKV,
    "mistral": spec("mistral", 1, 1, num_hidden_layers=3, sliding_window=24),
    "qwen2": spec("qwen2", 2, 2, num_hidden_layers=4),
    "qwen3": spec("qwen3", 2, 2, num_hidden_layers=4, tie_word_embeddings=True),
    "one KV head, head dim 80, 5 layers cut at 3, ragged group, tied": spec(
        "llama", 3, 4, num_hidden_layers=5, num_key_value_heads=1, head_dim=80, tie_word_embeddings=True
    ),
    "8 query heads per KV head, untied, cut at 1": spec(
        "llama", 1, 2, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=1, head_dim=64
    ),
}


@lru_cache
def session_of(engine: Path) -> Session:
    return load_session(engine, load_manifest(engine))


def tokens_for(engine: Path) -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, load_manifest(engine).vocab_size, (PROMPT + DECODED,), generator=generator).tolist()


def engine_logits(engine: Path, tokens: list[int], chunk: int) -> Tensor:
    """Logits of every position: the prompt in chunks, then one token a step."""
    driver = StepDriver(session_of(engine), seed=chunk)
    steps = [tokens[start : min(start + chunk, PROMPT)] for start in range(0, PROMPT, chunk)]
    steps += [[token] for token in tokens[PROMPT:]]
    return torch.cat([driver.run(step) for step in steps])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", PLAIN)
def test_plain_engine_equals_transformers(family: str, engines: EngineShelf) -> None:
    engine = engines.engine(PLAIN[family])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        engines.checkpoint(PLAIN[family]), attn_implementation="eager"
    ).eval()
    tokens = tokens_for(engine)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    for chunk in CHUNKS:
        assert relative_error(engine_logits(engine, tokens, chunk), expected) <= TOLERANCE, chunk


@pytest.mark.parametrize("case", REWIRED)
def test_swiftkv_engine_equals_the_all_token_reference(case: str, engines: EngineShelf) -> None:
    engine, checkpoint = engines.engine(REWIRED[case]), engines.checkpoint(REWIRED[case])
    tokens = tokens_for(engine)
    config = load_config(json.loads((checkpoint / "config.json").read_text()))
    expected = reference_logits(config, load_weights(checkpoint), torch.tensor(tokens))
    for chunk in CHUNKS:
        assert relative_error(engine_logits(engine, tokens, chunk), expected) <= TOLERANCE, chunk
    assert relative_error(engine_logits(engine, tokens[:1], 1), expected[:1]) <= TOLERANCE


def test_survivors_have_the_logits_of_the_all_token_run(engines: EngineShelf) -> None:
    """Prompt chunks without any survivor, then one survivor, equal the reference at that token."""
    engine, checkpoint = engines.engine(SWIFTKV), engines.checkpoint(SWIFTKV)
    tokens = tokens_for(engine)[:PROMPT]
    config = load_config(json.loads((checkpoint / "config.json").read_text()))
    expected = reference_logits(config, load_weights(checkpoint), torch.tensor(tokens))
    driver = StepDriver(session_of(engine))
    assert driver.run(tokens[:40], num_survivors=0).shape == (0, load_manifest(engine).vocab_size)
    driver.run(tokens[40:70], num_survivors=0)
    assert relative_error(driver.run(tokens[70:], num_survivors=1), expected[-1:]) <= TOLERANCE


def test_bf16_cache_under_an_fp32_model_is_close(engines: EngineShelf) -> None:
    options = dataclasses.replace(SWIFTKV.options, kv_dtype="bf16")
    mixed = dataclasses.replace(SWIFTKV, options=options)
    engine, exact = engines.engine(mixed), engines.engine(SWIFTKV)
    assert load_manifest(engine).kv_bytes_per_token * 2 == load_manifest(exact).kv_bytes_per_token
    tokens = tokens_for(engine)
    error = relative_error(engine_logits(engine, tokens, 64), engine_logits(exact, tokens, 64))
    assert 0 < error < 0.03
