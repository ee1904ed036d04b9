"""Bytes as the package of costs counts them, against the tensors of real engines."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kvforge.compiler.convert import FREQUENCIES
from kvforge.compiler.cpu_graph import linears, packed_tensors
from kvforge.compiler.options import PACKED_DTYPES
from kvforge.costs.cache import kv_bytes, kv_read_bytes
from kvforge.costs.weights import WEIGHT_BYTES, num_parameters, step_weight_bytes, step_weights, weight_bytes
from kvforge.manifest import WEIGHTS_FILE, load_manifest
from kvforge.planning import cuts
from kvforge.planning.presets import PRESETS
from kvforge.runtime import LLMEngine
from model_defs import load_config
from model_defs.weights import weight_specs
from perf.harness.random_checkpoint import QWEN3_30B_A3B, with_cut
from tests.support.models.checkpoints import SMALL, own_fields
from tests.support.models.engines import (
    EARLY_EXIT,
    INT4_WEIGHTS,
    INT8_WEIGHTS,
    PLAIN,
    SWIFTKV,
    SWIFTKV_BF16,
    SWIFTKV_FP8,
    EngineSpec,
)
from tests.support.models.shelf import EngineShelf

SPECS = {
    "plain": PLAIN, "cut": SWIFTKV, "bf16": SWIFTKV_BF16, "fp8 cache": SWIFTKV_FP8, "int8, tied, biases": INT8_WEIGHTS,
    "int4, tied, biases": INT4_WEIGHTS, "early exit": EARLY_EXIT,
}  # fmt: skip


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_step_reads_the_matrices_of_the_file(engines_compiled_with_full: EngineShelf, spec: EngineSpec) -> None:
    """All of them but the table of embeddings, which is looked up in, and the early exit's head; without scales a row.
    Packing pads no size here."""
    engine = engines_compiled_with_full.engine(spec)
    manifest, read = load_manifest(engine), 0
    with safe_open(engine / WEIGHTS_FILE, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (the file is no dictionary)
            tensor = file.get_tensor(name)
            is_matrix = name.endswith(".packed") or (name.endswith(".weight") and tensor.ndim == 2)
            if is_matrix and name != "embed.weight" and "exit" not in name:
                read += tensor.nbytes
    assert manifest.weight_bytes == step_weight_bytes(manifest.model, manifest.weight_dtype) == read


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_weights_in_memory_are_those_of_the_file(engines_compiled_with_full: EngineShelf, spec: EngineSpec) -> None:
    """But for the frequencies of RoPE."""
    engine = engines_compiled_with_full.engine(spec)
    manifest, held = load_manifest(engine), 0
    with safe_open(engine / WEIGHTS_FILE, "pt") as file:
        held = sum(file.get_tensor(name).nbytes for name in file.keys() if name != FREQUENCIES)  # noqa: SIM118
    assert weight_bytes(manifest.model, manifest.weight_dtype) == held


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_token_keeps_what_the_pools_hold(engines_compiled_with_full: EngineShelf, spec: EngineSpec) -> None:
    engine = LLMEngine(engines_compiled_with_full.engine(spec), num_pages=5)
    manifest = engine.manifest
    held = sum(tensor.nbytes for pool in engine.runner.pools for tensor in pool)
    assert held == 5 * manifest.page_size * manifest.kv_bytes_per_token == 5 * manifest.page_bytes
    shape = manifest.model
    assert kv_bytes(shape, manifest.kv_dtype) == manifest.kv_bytes_per_token
    assert manifest.owner_cache.token_bytes * manifest.model.num_owners == manifest.kv_bytes_per_token


def test_every_layer_reads_its_owners_cache_within_its_window() -> None:
    shape = cuts.with_cut(PRESETS["llama-3.1-8b"].model, 16, 4)
    of_owner = 2 * 8 * 128 * 2
    assert (shape.num_owners, kv_bytes(shape, "bfloat16")) == (20, 20 * of_owner)
    assert kv_read_bytes(shape, "bfloat16", 1000) == 32 * 1000 * of_owner
    windows = replace(shape, layer_windows=(0,) * 31 + (100,))
    assert kv_read_bytes(windows, "bfloat16", 1000) == (31 * 1000 + 100) * of_owner


def test_a_step_leaves_the_table_of_embeddings_alone() -> None:
    """Llama 3.1 8B has 8.03e9 parameters, of which a step reads 7.5e9; a mixture of experts is read as a whole."""
    llama = PRESETS["llama-3.1-8b"].model
    norms = (2 * llama.num_layers + 1) * llama.hidden_size
    lookup = llama.vocab_size * llama.hidden_size
    assert weight_bytes(llama, "bfloat16") == 2 * (step_weights(llama) + lookup + norms)
    mixture = PRESETS["deepseek-v2-lite"].model
    norms = (2 * mixture.num_layers + 1) * mixture.hidden_size + mixture.num_layers * mixture.latent.rank
    lookup = mixture.vocab_size * mixture.hidden_size
    assert num_parameters(mixture) == step_weights(mixture) + lookup + norms


ODD = {"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 3, "num_key_value_heads": 1}


@pytest.mark.parametrize("cut", [None, 2])
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_padding_is_counted_as_it_is_packed(dtype: str, cut: int | None) -> None:
    """Of sizes that are no multiples of the panels and groups, against the tensors of a build, without contents."""
    check_padding(with_cut({"model_type": "llama", **SMALL, **ODD, "head_dim": 24, "vocab_size": 261}, cut, 2), dtype)


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("kinds", [["mamba", "mlp", "attention"], ["moe", "mamba", "mlp", "attention", "moe"]])
def test_a_layer_of_one_part_has_the_weights_of_that_part(dtype: str, kinds: list[str]) -> None:
    own = {**own_fields("nemotron_h", SMALL), "moe_intermediate_size": 36, "layer_types": kinds}
    hf = {"model_type": "nemotron_h", **SMALL, **ODD, **own, "num_hidden_layers": len(kinds), "vocab_size": 261}
    check_padding(hf, dtype)


@pytest.mark.parametrize("cut", [None, 1])
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_padding_of_latents_beside_states_is_counted(dtype: str, cut: int | None) -> None:
    own = {**own_fields("kimi_linear", {"num_hidden_layers": 4}), "linear_head_dim": 20, "q_lora_rank": 36}
    hf = {"model_type": "kimi_linear", **SMALL, **ODD, **own, "vocab_size": 261}
    check_padding(with_cut(hf, cut, 1), dtype)


def check_padding(hf: dict[str, Any], dtype: str) -> None:
    config, packed_dtype = load_config(hf), PACKED_DTYPES[dtype]
    shapes = {spec.name.removesuffix(".weight"): spec.shape for spec in weight_specs(config)}
    shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    sizes = {"packed": 0, "scales": 0}
    for name, layer in linears(config).items():
        made = packed_tensors(torch.empty(shapes[name], device="meta"), layer, packed_dtype)
        for part, tensor in made.items():
            is_exact = tensor.dtype == torch.bfloat16  # which is counted without its padding
            sizes[part] += 2 * math.prod(shapes[name]) if is_exact else tensor.nbytes
    assert step_weight_bytes(config, dtype) == sizes["packed"] > step_weights(config) * WEIGHT_BYTES[dtype]
    lookup = config.vocab_size * config.hidden_size
    others = num_parameters(config) - step_weights(config)
    others += lookup if others < lookup else 0
    assert weight_bytes(config, dtype) == sizes["packed"] + sizes["scales"] + 2 * others


def test_qwen3_30b_a3b_has_its_published_numbers() -> None:
    """30.5e9 parameters, of which a token uses 3.3e9 with its embedding; few tokens read few experts."""
    shape = load_config(QWEN3_30B_A3B)
    assert num_parameters(cuts.without_cut(shape)) == 30_532_122_624
    lookup = shape.vocab_size * shape.hidden_size
    assert round((step_weights(shape, 1) + lookup) / 1e9, 2) == 3.35
    assert step_weights(shape, 0) < step_weights(shape, 1) < step_weights(shape, 8) < step_weights(shape)
    experts = shape.num_layers * 3 * 2048 * 768
    assert step_weights(shape) - step_weights(shape, 0) == 128 * experts
    assert step_weights(shape, 1) - step_weights(shape, 0) == 8 * experts
    routers = shape.num_layers * 2048 * 128
    assert step_weight_bytes(shape, "int8") == step_weights(shape) + routers
