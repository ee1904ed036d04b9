"""Models without a cut, of families that kvforge does not know: an engine gives the tokens of vLLM's own ``LLM``."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvforge import LLM, SamplingParams
from kvforge.compiler import BuildOptions, build_engine
from model_defs import families
from tests.support.models.checkpoints import make_checkpoint, write_byte_tokenizer
from tests.support.sessions.eager import eager_session
from tests.vllm.conftest import KV_CACHE_GIB, build
from tests.vllm.test_vllm_models import MAX_TOKENS, PROMPTS, installed, on_vllm  # noqa: F401 - a fixture

WHOLE_PAGES = 0.01
"""A cache is rounded down to whole pages, and one page is vLLM's own: less than this share of it."""
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
UNKNOWN: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 192, "word_embed_proj_dim": 128},
    "gpt_neox": {"intermediate_size": 192},
    "olmoe": {"intermediate_size": 64, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2},
}
"""Learned positions, parallel residuals, and experts."""


def write_random(path: Path, model_type: str, more: dict[str, Any]) -> Path:
    """A checkpoint whose every term is visible in the logits."""
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **more)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape) * (0.3 if parameter.dim() > 1 else 0.2)
            parameter.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
    model.save_pretrained(path)
    write_byte_tokenizer(path, config.vocab_size)
    return path


def generated(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_a_family_that_kvforge_does_not_know(model_type: str, installed: Path, tmp_path: Path) -> None:  # noqa: F811
    assert model_type not in families()
    checkpoint = write_random(tmp_path / "checkpoint", model_type, UNKNOWN[model_type])
    llm = LLM(build(checkpoint, tmp_path / "engine"), kv_cache_gib=KV_CACHE_GIB)
    tokens = generated(llm)
    del llm
    assert len({token for answer in tokens for token in answer}) > 8
    assert tokens == on_vllm(installed, tmp_path, checkpoint, fast=False)["tokens"]


def test_two_stages(tmp_path: Path) -> None:
    """Compiled, as vLLM runs it by default: without its warm-up vLLM's CPU backend has no input for a later stage."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", num_hidden_layers=4, head_dim=32, hidden_size=128)
    options = BuildOptions(target="vllm", dtype="float32", max_num_tokens=256, pipeline_parallel_size=2)
    build_engine(checkpoint, tmp_path / "engine", options)
    llm = LLM(tmp_path / "engine", kv_cache_gib=KV_CACHE_GIB)
    session = eager_session(checkpoint, BuildOptions(dtype="float32"))
    assert generated(llm) == generated(LLM(session=session, tokenizer=llm.tokenizer, kv_cache_gib=KV_CACHE_GIB))
    stats = llm.engine.stats()
    assert stats["kv_device_bytes"] == pytest.approx(2 * KV_CACHE_GIB * 2**30, rel=WHOLE_PAGES)
    both_stages = stats["page_size"] * 4 * 2 * 2 * 32 * 4
    assert stats["page_bytes"] == pytest.approx(both_stages, rel=WHOLE_PAGES), "one page of all is vLLM's own"
