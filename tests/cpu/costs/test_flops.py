"""FLOPs by part against Table 1, against counts by hand and against the compiler's own weights."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kvforge.common.errors import KvforgeError
from kvforge.costs.cache import kv_bytes, kv_read_bytes
from kvforge.costs.flops import (
    full_token,
    output_flops,
    prompt_flops,
    skipped_token,
    table_1,
)
from kvforge.costs.weights import num_parameters, step_weights
from kvforge.planning.cuts import with_cut, without_cut
from kvforge.planning.presets import PRESETS
from kvforge.swiftkv.model import SwiftKVForCausalLM
from model_defs import families, load_config
from model_defs.weights import weight_specs
from perf.gpu.models import Limits, Variant, manifest_of, resolved_options
from tests.support.models.checkpoints import WITH_HEADS, keeps_states, own_fields

PAPER = 0.01
"""The paper rounds its terms to two or three digits, in mixed units (docs/planning.md): a hundredth."""
PAPER_GFLOP = 0.1
"""A unit of the one digit to which the paper rounds K, V and the vocabulary."""
PAPER_PERCENT = 0.2
"""A share printed with one digit, of terms rounded before: docs/planning.md derives each of the paper's."""
PRINTED = 0.1
"""A unit of the one digit that the paper prints: it rounds once before."""

LLAMA_70B = PRESETS["llama-3.1-70b"].model
CONTEXT = 131072

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
CUT = [name for name, family in families().items() if family.is_rewired]
REWIRED = [name for name in CUT if not keeps_states(name)]


@pytest.mark.parametrize(
    ("cut", "group_size", "key_value", "query_output", "mlp", "attention", "relative"),
    [
        (80, 1, 2.684, 21.475, 112.743, 171.8, 100.0),
        (60, 1, 2.684, 16.106, 84.557, 128.85, 75.5),
        (40, 1, 2.684, 10.737, 56.371, 85.9, 51.0),
        (40, 4, 1.678, 10.737, 56.371, 85.9, 50.7),
    ],
)
def test_table_1(cut, group_size, key_value, query_output, mlp, attention, relative):
    """GFLOP per prompt token of Llama-3.1-70B; the relative cost as the paper prints it."""
    cost = table_1(with_cut(LLAMA_70B, cut, group_size), CONTEXT)
    assert cost.key_value / 1e9 == pytest.approx(key_value, abs=PAPER_GFLOP)
    assert cost.query_output / 1e9 == pytest.approx(query_output, rel=PAPER)
    assert cost.mlp / 1e9 == pytest.approx(mlp, rel=PAPER)
    assert cost.attention / 1e9 == pytest.approx(attention, rel=PAPER)
    assert cost.vocabulary / 1e9 == pytest.approx(4.295, abs=PAPER_GFLOP)
    assert 100 * cost.total / table_1(LLAMA_70B, CONTEXT).total == pytest.approx(relative, abs=PAPER_PERCENT)


def test_the_papers_own_rounding_gives_its_relative_costs():
    """Vocabulary and attention in 2**30 FLOP, the rest in 1e9, rounded first: docs/planning.md."""
    vocabulary, key_value, query_output, mlp, attention = 4, 2.6, 22, 113, 160
    exact = table_1(LLAMA_70B, CONTEXT)
    assert round(exact.vocabulary / 2**30) == vocabulary and round(exact.attention / 2**30) == attention
    assert round(exact.mlp / 1e9) == mlp
    layers = query_output + mlp + attention
    plain = vocabulary + key_value + layers
    printed = {(60, 1): 75.5, (40, 1): 51.0, (40, 4): 50.7}
    for (cut, group_size), percent in printed.items():
        owners = with_cut(LLAMA_70B, cut, group_size).num_owners
        cost = vocabulary + key_value * owners / 80 + layers * cut / 80
        assert 100 * cost / plain == pytest.approx(percent, abs=PRINTED)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("mistral-small-2409", 22_247_282_688),
        ("mistral-small-2501", 23_572_403_200),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("phi-4-mini", 3_836_021_760),
        ("yi-1.5-9b", 8_829_407_232),
        ("yi-1.5-34b", 34_388_917_248),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
    ],
)
def test_presets_have_the_parameters_of_the_published_checkpoints(name, parameters):
    shape = PRESETS[name].model
    assert num_parameters(shape) == num_parameters(without_cut(shape)) == parameters
    assert all(1 <= cut < shape.num_layers for cut in PRESETS[name].cuts)


def stored_numbers(config):
    """What a checkpoint holds: of tensors that engines have several times, one."""
    return sum(math.prod(spec.shape) * len(set(spec.sources)) // len(spec.sources) for spec in weight_specs(config))


@pytest.mark.parametrize("family", CUT)
@pytest.mark.parametrize(("cut", "group_size"), [(5, 1), (2, 1), (2, 2), (1, 4)])
def test_parameters_are_those_of_the_graphs(family, cut, group_size):
    swiftkv = {"swiftkv": True, "num_key_value_layers": cut, "key_value_group_size": group_size}
    for tied, bias in itertools.product((False, True), repeat=2):
        biases = {"attention_bias": bias, "mlp_bias": bias} if family == "llama" else {}
        hf = {**TINY, **own_fields(family, TINY), **biases, "tie_word_embeddings": tied}
        config = load_config({**hf, **swiftkv, "model_type": f"{family}_swiftkv"})
        shape = config
        assert num_parameters(shape) == stored_numbers(config)
        plain = load_config({**hf, "model_type": family})
        assert num_parameters(without_cut(shape)) == stored_numbers(plain)


def test_a_token_by_hand():
    """Every matrix of the compiler's graphs, 2 FLOPs a weight, and attention."""
    config = load_config(
        {**TINY, "model_type": "llama_swiftkv", "num_key_value_layers": 2, "key_value_group_size": 2, "swiftkv": True}
    )
    sizes = {spec.name: math.prod(spec.shape) for spec in weight_specs(config) if len(spec.shape) == 2}
    lower = sum(size for name, size in sizes.items() if name.startswith(("layers.0.", "layers.1.", "single_input.kv")))
    everything = sum(sizes.values()) - sizes["embed.weight"]
    assert skipped_token(config, 100).total == 2 * lower + 2 * 4 * 64 * 50.5
    assert full_token(config, 7).total == 2 * everything + 5 * 4 * 64 * 7
    assert full_token(config, 7).vocabulary == 2 * 96 * 64
    # Prompt: every token below the cut, the last one also above it. Outputs: one by one.
    above = 2 * (everything - lower) + 3 * 4 * 64 * 10
    assert prompt_flops(config, 10) == pytest.approx(10 * skipped_token(config, 10).total + above)
    steps = [full_token(config, context).total for context in range(11, 14)]
    assert output_flops(config, 10, 4) == pytest.approx(sum(steps))
    assert output_flops(config, 10, 1) == 0


SHARED = {
    **{**TINY, "num_hidden_layers": 6, "model_type": "gemma4_text", "layer_types": ["sliding_attention"] * 6},
    **{"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "sliding_window": 20, "global_head_dim": 32},
    **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96},
}
SHARED["layer_types"][1::2] = ["full_attention"] * 3


def test_layers_of_several_sizes_by_hand():
    """Heads and MLPs of two sizes, inputs of each layer, and caches that the three layers above the cut read."""
    config = load_config(SHARED)
    sizes = {spec.name: math.prod(spec.shape) for spec in weight_specs(config) if len(spec.shape) == 2}
    tables = ("embed.weight", "per_layer.embed")
    below = ("per_layer.context", "layers.0.", "layers.1.", "layers.2.")
    lower = sum(size for name, size in sizes.items() if name.startswith(below))
    everything = sum(size for name, size in sizes.items() if name not in tables) + sizes["embed.weight"]  # the head
    assert num_parameters(config) == stored_numbers(config)
    windowed = sum(min(position + 1, 20) for position in range(100)) / 100
    assert skipped_token(config, 100).total == 2 * lower + 4 * (64 * 2 * windowed + 128 * 50.5)
    assert full_token(config, 30).total == 2 * everything + 4 * 3 * (64 * 20 + 128 * 30)
    assert step_weights(config) == everything
    assert kv_bytes(config, "bfloat16") == 2 * 2 * 2 * (16 + 32 + 16)
    assert kv_read_bytes(config, "bfloat16", 30) == 2 * 2 * 2 * 3 * (16 * 20 + 32 * 30)
    limits = Limits(max_num_seqs=4, max_num_tokens=64, max_seq_len=128, page_size=16)
    manifest = manifest_of(config, resolved_options(config, Variant(), limits, "cpu"))
    assert manifest.kv_bytes_per_token == kv_bytes(config, "bfloat16") and manifest.weight_bytes == 2 * everything
    assert skipped_token(without_cut(config), 100).total > 2 * skipped_token(config, 100).total
    with pytest.raises(KvforgeError, match=r"whose layers share caches already; give 3, or 6 for no cut\.$"):
        with_cut(config, 2)


def test_windows_bound_the_keys():
    shape = dataclasses.replace(load_config({**TINY, "model_type": "llama"}), layer_windows=(8,) * 5)
    steps = [full_token(shape, context).attention for context in range(6, 31)]
    assert steps[-1] == 5 * 4 * 64 * 8
    total = output_flops(shape, 5, 26)
    assert total == pytest.approx(sum(full_token(shape, context).total for context in range(6, 31)))
    seen = sum(min(position + 1, 8) for position in range(30)) / 30
    assert skipped_token(shape, 30).attention == pytest.approx(5 * 4 * 64 * seen)


def test_experts_and_latent_attention_by_hand():
    """DeepSeek-V2-Lite: one dense layer, six routed and two shared experts; the cache has 576 numbers a layer."""
    shape = with_cut(PRESETS["deepseek-v2-lite"].model, 15, 4)
    cost = skipped_token(shape, 1)
    assert shape.num_owners == 18
    assert cost.key_value == 2 * (18 * 2048 * 576 + 15 * 512 * 16 * 256)
    assert cost.query_output == 15 * 2 * 2048 * (16 * 192 + 16 * 128)
    assert cost.mlp == 2 * (3 * 2048 * 10944 + 14 * (8 * 3 * 2048 * 1408 + 2048 * 64))
    assert cost.attention == 15 * 2 * 16 * (192 + 128)
    assert full_token(shape, 1).attention == 27 * 2 * 16 * (2 * 512 + 64)
    assert full_token(shape, 1, True).attention == 27 * 2 * 16 * (192 + 128)
    # Past the cut the last prompt token attends latent rows: nobody has expanded those.
    layer = 2 * (512 * 16 * 256 + 2048 * (16 * 192 + 16 * 128) + 8 * 3 * 2048 * 1408 + 2048 * 64)
    above = 12 * (layer + 2 * 16 * (2 * 512 + 64) * 10) + 2 * 102400 * 2048
    assert prompt_flops(shape, 10) == pytest.approx(10 * skipped_token(shape, 10).total + above)


@pytest.mark.parametrize(("cut", "group_size"), [(0, 1), (81, 1), (-1, 1), (40, 0)])
def test_impossible_cuts_are_refused(cut, group_size):
    with pytest.raises(KvforgeError, match=r"^--(cut|group-size) .*\.$"):
        with_cut(LLAMA_70B, cut, group_size)


@pytest.mark.parametrize("swiftkv", [{}, {"swiftkv": True, "num_key_value_layers": 2, "key_value_group_size": 2}])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", REWIRED)
def test_engine_and_checkpoint_have_the_same_shape(family, bias, swiftkv):
    """``prefill_flops_per_token`` of an engine's manifest, its parameters with and without the cut."""
    if bias and family not in WITH_HEADS:
        pytest.skip("latent attention has no biases")
    suffix = "_swiftkv" if swiftkv else ""
    hf = {**TINY, **own_fields(family, TINY), **swiftkv, "tie_word_embeddings": True, "attention_bias": bias}
    config = load_config({**hf, "model_type": f"{family}{suffix}"})
    limits = Limits(max_num_seqs=4, max_num_tokens=64, max_seq_len=128, page_size=16)
    manifest = manifest_of(config, resolved_options(config, Variant(), limits, "cpu"))
    expected = config
    assert manifest.model == expected
    assert manifest.prefill_flops_per_token(100) == skipped_token(expected, 100).total
    if config.latent is not None:
        return  # by hand above
    hidden, q_dim, kv_dim, inner = 64, 64, 32, 80
    mlps = [3 * hidden * inner] * config.cut
    if config.experts:
        experts, count = config.experts, TINY["num_experts"] if config.experts.num_shared == 0 else 128
        mixture = (2 + experts.num_shared) * 3 * hidden * experts.intermediate_size + hidden * count
        mlps = [mixture if layer in experts.layers else mlp for layer, mlp in enumerate(mlps)]
    of_layers = sum(2 * (2 * hidden * q_dim + mlp) + 4 * q_dim * 50.5 for mlp in mlps)
    assert manifest.prefill_flops_per_token(100) == manifest.model.num_owners * 4 * hidden * kv_dim + of_layers


@pytest.mark.parametrize("swiftkv", [{}, {"swiftkv": True, "num_key_value_layers": 2, "key_value_group_size": 2}])
@pytest.mark.parametrize("tokens", [7, 24])
@pytest.mark.parametrize("family", REWIRED)
def test_a_run_of_every_layer_costs_what_torch_counts(family, tokens, swiftkv):
    """The model that distillation trains runs all layers and the head for each token. Its attention multiplies whole
    squares of scores, masked afterwards: every token counts as the last one."""
    hf = {**TINY, **own_fields(family, TINY), **swiftkv}
    config = load_config({**hf, "model_type": family + ("_swiftkv" if swiftkv else "")})
    model = SwiftKVForCausalLM(config).eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long))
    assert counter.get_total_flops() == tokens * full_token(config, tokens, is_expanded=True).total
