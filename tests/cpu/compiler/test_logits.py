"""Compiled engines against Hugging Face transformers and against the plain all-token reference, fp32."""

import dataclasses
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvforge.compiler import build_engine
from kvforge.manifest import load_manifest
from kvforge.runtime.sessions.session import Session, load_session
from model_defs.reference import reference_logits
from plugins.kv_rotation import rotate_blocks
from tests.support.models.checkpoints import ALL_FAMILIES, FAMILIES, load_weights, make_checkpoint
from tests.support.models.engines import AWKWARD, SWIFTKV, SWIFTKV_FP8, EngineSpec
from tests.support.models.engines import PLAIN as SHARED_PLAIN
from tests.support.models.shelf import EngineShelf
from tests.support.rounding import assert_near, config_of, model_error, relative_error, roundings_error, sum_error
from tests.support.schedules.step_driver import StepDriver

PROMPT, DECODED = 100, 32
CHUNKS = (1, 7, 64, PROMPT)


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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
PLAIN = {family: spec(family, num_hidden_layers=3) for family in ALL_FAMILIES} | {
    "llama": SHARED_PLAIN,
    "llama, angles of Llama 3.1": spec("llama", num_hidden_layers=3, rope_parameters=LLAMA3_ROPE),
    "mistral": spec("mistral", num_hidden_layers=3, sliding_window=24),
    "qwen2": spec("qwen2", num_hidden_layers=3, tie_word_embeddings=True),
    "qwen3": spec("qwen3", num_hidden_layers=3, head_dim=32),
    "gemma4_text": spec(
        "gemma4_text",
        num_hidden_layers=5,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        sliding_window=24,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "olmo3": spec(
        "olmo3",
        num_hidden_layers=4,
        sliding_window=24,
        rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_type": "default"}},
    ),
    "glm4_moe": spec("glm4_moe", num_hidden_layers=3, num_attention_heads=6),
    "deepseek_v3": spec("deepseek_v3", num_hidden_layers=3, rope_parameters=YARN, q_lora_rank=24),
    "deepseek_v2": spec("deepseek_v2", num_hidden_layers=3, rope_parameters=YARN, q_lora_rank=24),
}
REWIRED = {family: spec(family, 2, 2, num_hidden_layers=4) for family in FAMILIES} | {
    "llama": SWIFTKV,
    "mistral": spec("mistral", 1, 1, num_hidden_layers=3, sliding_window=24),
    "linear attention": spec("qwen3_5_text", 2, 1, num_hidden_layers=5),
    "qwen3": spec("qwen3", 2, 2, num_hidden_layers=4, tie_word_embeddings=True),
    "one KV head, head dim 80, 5 layers cut at 3, ragged group, tied": AWKWARD,
    "8 query heads per KV head, untied, cut at 1": spec(
        "llama", 1, 2, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=1, head_dim=64
    ),
}

COMPILED = (PLAIN["llama"], SWIFTKV, AWKWARD, REWIRED["deepseek_v2"])
"""Engines that are compiled here without --full too: no cut; a cut with groups; biases, tied embeddings, a head of 80;
latents and experts. Of the others torch runs the exported graphs."""

SESSIONS = (
    "exaone4",
    "gemma3_text",
    "gemma4_text",
    "glm",
    "glm4",
    "gpt_oss",
    "granite",
    "granitemoehybrid",
    "ministral3",
    "olmo2",
    "phi3",
    "smollm3",
)
"""Families whose graphs test_rotations.py runs without compiling them."""


@pytest.fixture
def engine_of(engines: EngineShelf, engines_compiled_with_full: EngineShelf) -> Callable[[EngineSpec], Path]:
    return lambda spec: (engines if spec in COMPILED else engines_compiled_with_full).engine(spec)


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


@pytest.mark.with_full(family=SESSIONS)
@pytest.mark.parametrize("family", PLAIN)
def test_plain_engine_equals_transformers(
    family: str, engines: EngineShelf, engine_of: Callable[[EngineSpec], Path]
) -> None:
    engine = engine_of(PLAIN[family])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        engines.checkpoint(PLAIN[family]), attn_implementation="eager"
    ).eval()
    tokens = tokens_for(engine)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    rounding = model_error(config_of(engines.checkpoint(PLAIN[family])), len(tokens))
    for chunk in CHUNKS:
        assert_near(engine_logits(engine, tokens, chunk), expected, rounding, chunk)


@pytest.mark.with_full(case=SESSIONS)
@pytest.mark.parametrize("case", REWIRED)
def test_swiftkv_engine_equals_the_all_token_reference(
    case: str, engines: EngineShelf, engine_of: Callable[[EngineSpec], Path]
) -> None:
    engine, checkpoint = engine_of(REWIRED[case]), engines.checkpoint(REWIRED[case])
    tokens, config = tokens_for(engine), config_of(checkpoint)
    rounding = model_error(config, len(tokens))
    expected = reference_logits(config, load_weights(checkpoint), torch.tensor(tokens))
    for chunk in CHUNKS:
        assert_near(engine_logits(engine, tokens, chunk), expected, rounding, chunk)
    assert_near(engine_logits(engine, tokens[:1], 1), expected[:1], rounding)


def test_survivors_have_the_logits_of_the_all_token_run(engines: EngineShelf) -> None:
    """Prompt chunks without any survivor, then one survivor, equal the reference at that token."""
    engine, checkpoint = engines.engine(SWIFTKV), engines.checkpoint(SWIFTKV)
    tokens = tokens_for(engine)[:PROMPT]
    config = config_of(checkpoint)
    expected = reference_logits(config, load_weights(checkpoint), torch.tensor(tokens))
    driver = StepDriver(session_of(engine))
    assert driver.run(tokens[:40], num_survivors=0).shape == (0, load_manifest(engine).vocab_size)
    driver.run(tokens[40:70], num_survivors=0)
    assert_near(driver.run(tokens[70:], num_survivors=1), expected[-1:], model_error(config, PROMPT))


def test_bf16_cache_under_an_fp32_model_is_close(engines_compiled_with_full: EngineShelf) -> None:
    engines = engines_compiled_with_full
    options = dataclasses.replace(SWIFTKV.options, kv_dtype="bf16")
    mixed = dataclasses.replace(SWIFTKV, options=options)
    engine, exact = engines.engine(mixed), engines.engine(SWIFTKV)
    assert load_manifest(engine).kv_bytes_per_token * 2 == load_manifest(exact).kv_bytes_per_token
    tokens = tokens_for(engine)
    error = relative_error(engine_logits(engine, tokens, 64), engine_logits(exact, tokens, 64))
    # K and V are rounded once in each layer, and every other number is as before.
    num_layers = config_of(engines.checkpoint(mixed)).num_layers
    assert 0 < error < roundings_error(2 * num_layers, torch.bfloat16)


def test_fp8_cache_equals_the_all_token_reference_with_the_same_cache(engines: EngineShelf) -> None:
    """Engine and reference round K and V to the same numbers. float32's error may turn a rounding now and then, one
    element in thousands, which is a small part of what the format itself changes."""
    engine, checkpoint = engines.engine(SWIFTKV_FP8), engines.checkpoint(SWIFTKV_FP8)
    tokens = tokens_for(engine)
    config, weights = config_of(checkpoint), load_weights(checkpoint)
    exact = reference_logits(config, weights, torch.tensor(tokens))
    expected = reference_logits(config, weights, torch.tensor(tokens), torch.float8_e4m3fn)
    effect = (expected - exact).square().mean().sqrt()
    assert 0.001 < effect / exact.std() < 0.1
    for chunk in CHUNKS:
        error = (engine_logits(engine, tokens, chunk) - expected).square().mean().sqrt()
        assert error < effect / 20, chunk


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_cached_elements_are_within_the_formats_error(
    kv_dtype: str, engines: EngineShelf, engines_compiled_with_full: EngineShelf
) -> None:
    """Layer 0 sees the same inputs whatever the cache: its K and V, read from the pools, are the exact engine's within
    half a step of the format, and by what float32 rounds in a norm, a projection, the rotations and the division."""
    options = dataclasses.replace(SWIFTKV_FP8.options, kv_dtype=kv_dtype)
    shelf = engines if kv_dtype == "fp8" else engines_compiled_with_full
    engine = shelf.engine(dataclasses.replace(SWIFTKV_FP8, options=options))
    drivers = [StepDriver(session_of(path)) for path in (engine, engines.engine(SWIFTKV))]
    for driver in drivers:
        driver.run(tokens_for(engine)[:PROMPT])
    (k, v, k_scales, v_scales), exact = drivers[0].pools[0], drivers[1].pools[0]
    written = exact[0].isfinite().all(-1).all(-1)
    assert written.sum() == PROMPT
    hidden = config_of(engines.checkpoint(SWIFTKV)).hidden_size
    keys, spread = (exact[0], 1.0) if kv_dtype == "fp8" else (rotate_blocks(exact[0]), exact[0].shape[-1] ** 0.5)
    for stored, scale, x, grown in ((k, k_scales, keys, spread), (v, v_scales, exact[1], 1.0)):
        wide, x = scale[written][..., None], x[written]
        step = torch.maximum(x.abs() / 8, wide * 2**-9) if kv_dtype == "fp8" else wide
        rounding = grown * sum_error(hidden, hidden, 4) * x.abs().max()
        assert ((stored[written].float() * wide - x).abs() <= step / 2 + rounding).all()
        assert (stored[written].float().abs().amax(-1) == (448 if kv_dtype == "fp8" else 127)).all()


@pytest.mark.usefixtures("compiled_with_full")
def test_static_scales_of_the_checkpoint_are_the_engines(tmp_path: Path) -> None:
    """A checkpoint calibrated for an FP8 cache becomes, by default, an engine with its scales."""
    path = make_checkpoint(tmp_path / "model", cut=1, num_hidden_layers=2)
    scales = ((0.011, 0.02), (0.013, 0.015))
    weights = load_file(path / "model.safetensors")
    for layer, (suffix, pair) in enumerate(zip(("", "_swiftkv"), scales, strict=True)):
        for name, value in zip("kv", pair, strict=True):
            scale = torch.tensor(value)
            weights[f"model.layers.{layer}.self_attn.{name}_proj{suffix}.{name}_scale"] = scale
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(quantization))
    manifest = build_engine(path, tmp_path / "engine", SWIFTKV.options)
    assert manifest.kv_dtype == "fp8_static"
    assert manifest.kv_scales == tuple(tuple(float(torch.tensor(x)) for x in pair) for pair in scales)
    assert load_manifest(tmp_path / "engine") == manifest
    tokens = tokens_for(tmp_path / "engine")
    config = config_of(path)
    expected = reference_logits(
        config, load_weights(path), torch.tensor(tokens), torch.float8_e4m3fn, manifest.kv_scales
    )
    exact = reference_logits(config, load_weights(path), torch.tensor(tokens))
    error = (engine_logits(tmp_path / "engine", tokens, 30) - expected).square().mean().sqrt()
    assert error < (expected - exact).square().mean().sqrt() / 20
