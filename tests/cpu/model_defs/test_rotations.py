"""Every way that heads rotate, in every family that has it: sessions against transformers, and with a cut and groups
against the plain all-token reference, in chunks, while decoding, and beyond the original context."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kvforge.checkpoint.model import open_model
from kvforge.compiler import BuildOptions
from kvforge.swiftkv import load_model
from model_defs import ModelConfig
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.rounding import assert_near, config_of, model_error
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.eager import EagerSession, eager_session

PROMPT, DECODED = 100, 32
LENGTH = PROMPT + DECODED
CHUNKS = (1, 7, 64, PROMPT)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 48}
SHORT, LONG = [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8], [1.1, 1.4, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0]
MULTIPLIERS = {
    "embedding_multiplier": 12.3,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 7,
    "rms_norm_eps": 1e-2,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn, MHA": ("llama", {"rope_parameters": YARN, "num_key_value_heads": 4}),
    "yarn, biases": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "phi3": ("phi3", {"original_max_position_embeddings": 48, "sliding_window": 600}),
    "phi3, longrope, rotated in part": (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6]},
            "original_max_position_embeddings": 48,
            "partial_rotary_factor": 0.75,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "sliding_window": 40,
        },
    ),
    "glm": ("glm", {}),
    "glm, head dim 80, one KV head, tied": (
        "glm",
        {"head_dim": 80, "num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": False},
    ),
    "glm4": ("glm4", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
    "glm4, 8 query heads per KV head": ("glm4", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}),
    "gemma3_text": (
        "gemma3_text",
        {
            "num_hidden_layers": 5,
            "sliding_window_pattern": 5,
            "sliding_window": 24,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}},
        },
    ),
    "queries that grow": (
        "ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4}, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "rotation in windows alone": (
        "exaone4",
        {"sliding_window": 24, "sliding_window_pattern": 2, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "multipliers": (
        "granite",
        {**MULTIPLIERS, "num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True},
    ),
    "multipliers, no layer rotates": (
        "granitemoehybrid",
        {**MULTIPLIERS, "num_attention_heads": 6, "num_key_value_heads": 3, "position_embedding_type": None},
    ),
    "norms after, of all heads": ("olmo2", {"num_attention_heads": 6, "head_dim": 10, "attention_bias": True}),
    "norms after, windows": ("olmo3", {"sliding_window": 24, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "layers without rotation, also above the cut": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0, 1, 0], "num_attention_heads": 6, "use_sliding_window": True, "sliding_window": 24},
    ),
    "yarn where not all layers rotate": ("smollm3", {"rope_parameters": YARN, "no_rope_layer_interval": 2}),
    "sinks, yarn that is not truncated": (
        "gpt_oss",
        {
            "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
            "sliding_window": 24,
            "swiglu_limit": 0.7,
            "num_attention_heads": 6,
        },
    ),
    "Yi": ("llama", {"rope_theta": 5e6, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "yarn, q and k norms": ("qwen3", {"rope_parameters": YARN, "head_dim": 80, "num_key_value_heads": 1}),
}
"""A family, and what its config.json says; the prompt is longer than the original context."""


def session_of(path: Path, max_seq_len: int | None = None, config: ModelConfig | None = None) -> EagerSession:
    return eager_session(path, BuildOptions(page_size=8, max_num_tokens=256, max_seq_len=max_seq_len), config)


def tokens_of(session: EagerSession) -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, session.config.vocab_size, (LENGTH,), generator=generator).tolist()


def session_logits(session: EagerSession, tokens: list[int], chunk: int) -> Tensor:
    """Logits of every position: the prompt in chunks, then one token a step."""
    driver = StepDriver(session, seed=chunk)
    steps = [tokens[start : min(start + chunk, PROMPT)] for start in range(0, PROMPT, chunk)]
    steps += [[token] for token in tokens[PROMPT:]]
    return torch.cat([driver.run(step) for step in steps])


def assert_session_equals_transformers(path: Path) -> None:
    """In every size of chunk."""
    session = session_of(path)
    tokens = tokens_of(session)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    for chunk in CHUNKS:
        assert_near(session_logits(session, tokens, chunk), expected, model_error(session.config, LENGTH), chunk)


@pytest.mark.parametrize("case", MODELS)
def test_a_plain_session_equals_transformers(case: str, tmp_path: Path) -> None:
    family, changes = MODELS[case]
    path = make_checkpoint(tmp_path / "model", family, **{"num_hidden_layers": 3, **changes})
    assert_session_equals_transformers(path)


@pytest.mark.parametrize("case", MODELS)
def test_a_session_with_a_cut_equals_the_reference(case: str, tmp_path: Path) -> None:
    """Five layers, cut at 2, groups of 2: the last one is smaller."""
    family, changes = MODELS[case]
    path = make_checkpoint(tmp_path / "model", family, cut=2, group_size=2, **{**changes, "num_hidden_layers": 5})
    session = session_of(path)
    tokens, config = tokens_of(session), config_of(path)
    expected = reference_logits(config, load_weights(path), torch.tensor(tokens))
    for chunk in CHUNKS:
        assert_near(session_logits(session, tokens, chunk), expected, model_error(config, LENGTH), chunk)
    with torch.no_grad():
        differentiable = load_model(open_model(path), config, torch.float32)(torch.tensor([tokens]))[0]
    assert_near(differentiable, expected, model_error(config, LENGTH))
