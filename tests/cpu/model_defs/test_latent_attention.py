"""Latent attention: the graphs against transformers and against a module written after the public training code, with
and without a cut; what a token keeps; what is refused."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.common.errors import BuildError, CheckpointError, KvforgeError
from kvforge.compiler.convert import FREQUENCIES, convert_weights
from kvforge.compiler.options import BuildOptions, resolve
from kvforge.costs.weights import num_parameters, weight_bytes
from kvforge.quantize import quantize_checkpoint
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.runtime.sessions.pools import device_bytes
from model_defs import ModelConfig, ModelError, load_config
from model_defs.reference import reference_hidden, reference_logits
from plugins.packed_linear.packing import IN_STEPS
from tests.support.models.checkpoints import SMALL, load_weights, make_checkpoint
from tests.support.rounding import assert_near, config_of, model_error, rounded_model_error
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.eager import eager_session

FAMILY = "deepseek_v2"
NEAR = 1e-4
"""How near fp32 logits have to be to transformers' at all, whatever rounding may do."""
PRINTED = 5e-6
"""Half a unit of the last digit of 0.11472."""
PROMPT, DECODED = 70, 32
CHUNKS = (1, 7, 64, PROMPT)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
IN_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
CASES: dict[str, dict[str, Any]] = {
    "as Lite": {"rope_parameters": YARN, "max_position_embeddings": 128, "rms_norm_eps": 1e-3},
    "queries from a latent, experts in groups": {"q_lora_rank": 24, **IN_GROUPS},
    "YaRN with an amplitude": {"rope_parameters": {**YARN, "mscale": 1.0}, "max_position_embeddings": 128},
    "no expert anywhere, one head": {"first_k_dense_replace": 9, "num_attention_heads": 1, "tie_word_embeddings": True},
    "odd sizes": {"kv_lora_rank": 22, "qk_nope_head_dim": 10, "qk_rope_head_dim": 2, "v_head_dim": 7},
}
CUTS = {"groups of two": (2, 2, 4), "a ragged last group": (1, 3, 5), "no sharing": (2, 1, 3)}
OPTIONS = BuildOptions(page_size=8, max_num_tokens=128)


def tokens_of(count: int = PROMPT + DECODED) -> Tensor:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(5))


def logits(path: Path, tokens: Tensor, chunk: int, **options: Any) -> Tensor:
    """Logits of every position: the prompt in chunks, then one token a step."""
    driver = StepDriver(eager_session(path, dataclasses.replace(OPTIONS, **options)), seed=chunk)
    prompt, decoded = tokens[:PROMPT], tokens[PROMPT:]
    return torch.cat([driver.run(part.tolist()) for part in (*prompt.split(chunk), *decoded.split(1))])


@pytest.mark.parametrize("case", CASES)
def test_graphs_and_reference_equal_transformers(case: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", FAMILY, num_hidden_layers=3, **CASES[case])
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    tokens, config = tokens_of(), config_of(path)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    rounding = model_error(config, len(tokens))
    assert rounding < NEAR
    assert_near(reference_logits(config, load_weights(path), tokens), expected, rounding)
    for chunk in CHUNKS:
        assert_near(logits(path, tokens, chunk), expected, rounding, chunk)


@pytest.mark.parametrize("query_rank", [None, 24])
@pytest.mark.parametrize("case", CUTS)
def test_a_cut_equals_the_all_token_reference(case: str, query_rank: int | None, tmp_path: Path) -> None:
    cut, group_size, num_layers = CUTS[case]
    shape = {"num_hidden_layers": num_layers, "q_lora_rank": query_rank}
    path = make_checkpoint(tmp_path / "c", FAMILY, cut=cut, group_size=group_size, **shape)
    tokens, config = tokens_of(), config_of(path)
    expected = reference_logits(config, load_weights(path), tokens)
    for chunk in CHUNKS:
        assert_near(logits(path, tokens, chunk), expected, model_error(config, len(tokens)), chunk)


def test_survivors_have_the_logits_of_the_all_token_run(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", FAMILY, cut=2, group_size=2)
    tokens, config = tokens_of(PROMPT), config_of(path)
    expected = reference_logits(config, load_weights(path), tokens)
    driver = StepDriver(eager_session(path, OPTIONS))
    assert driver.run(tokens[:40].tolist(), num_survivors=0).shape == (0, config.vocab_size)
    last = driver.run(tokens[40:].tolist(), num_survivors=1)
    assert_near(last, expected[-1:], model_error(config, PROMPT))


def set_routers_to_zero(path: Path) -> None:
    """Where all experts are active, they then count the same, whatever is rounded."""
    stored = load_file(path / "model.safetensors")
    routers = {name: torch.zeros_like(tensor) for name, tensor in stored.items() if name.endswith(".gate.weight")}
    save_file(stored | routers, path / "model.safetensors", metadata={"format": "pt"})


def norm(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    return gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotate_pairs(x: Tensor) -> Tensor:
    """Neighbours of ``[n, …, dim]`` as complex numbers, turned at position n."""
    dim = x.shape[-1]
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    turn = torch.polar(torch.ones_like(angles), angles).view(len(x), *(1,) * (x.dim() - 2), -1)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


def upper_attention(
    weights: Mapping[str, Tensor], config: ModelConfig, layer: int, hidden: Tensor, entering: Tensor
) -> Tensor:
    """What attention adds above the cut, as the public training code has it: K and V of the group's first layer from
    ``norm_swiftkv`` of the state entering the cut, through its three ``_swiftkv`` modules; queries of each layer."""
    latent, owner = config.latent, config.owner_of_layer[layer]
    assert latent is not None
    own, leader = (f"model.layers.{index}.self_attn." for index in (layer, owner))
    source = norm(entering, weights["model.norm_swiftkv.weight"], config.rms_norm_eps)
    compressed = source @ weights[f"{leader}kv_a_proj_with_mqa_swiftkv.weight"].T
    compressed, shared = compressed.split([latent.rank, latent.rope_dim], -1)
    compressed = norm(compressed, weights[f"{leader}kv_a_layernorm_swiftkv.weight"])
    kv = (compressed @ weights[f"{leader}kv_b_proj_swiftkv.weight"].T).unflatten(-1, (config.num_heads, -1))
    k, v = kv.split([latent.nope_dim, latent.value_dim], -1)
    k = torch.cat((k, rotate_pairs(shared)[:, None].expand(-1, config.num_heads, -1)), -1)
    x = norm(hidden, weights[f"model.layers.{layer}.input_layernorm.weight"], config.rms_norm_eps)
    if latent.query_rank is not None:
        x = norm(x @ weights[f"{own}q_a_proj_swiftkv.weight"].T, weights[f"{own}q_a_layernorm_swiftkv.weight"])
    last = "q_proj" if latent.query_rank is None else "q_b_proj"
    q = (x @ weights[f"{own}{last}_swiftkv.weight"].T).unflatten(-1, (config.num_heads, -1))
    q = torch.cat((q[..., : latent.nope_dim], rotate_pairs(q[..., latent.nope_dim :])), -1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (latent.nope_dim + latent.rope_dim) ** -0.5
    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return mixed @ weights[f"{own}o_proj.weight"].T


@pytest.mark.parametrize("query_rank", [None, 24])
def test_leaders_and_members_compute_what_the_public_training_code_does(query_rank: int | None, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 5, "q_lora_rank": query_rank, "first_k_dense_replace": 9}
    path = make_checkpoint(tmp_path / "c", FAMILY, cut=2, group_size=2, **shape)
    config, weights, tokens = config_of(path), load_weights(path), tokens_of(40)
    states = reference_hidden(config, weights, tokens)
    assert config.upper_owners == (2, 4)
    for layer in range(2, 5):
        hidden = states[layer] + upper_attention(weights, config, layer, states[layer], states[2])
        mlp = f"model.layers.{layer}.mlp"
        x = norm(hidden, weights[f"model.layers.{layer}.post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (x @ weights[f"{mlp}.{part}_proj.weight"].T for part in ("gate", "up"))
        hidden = hidden + (F.silu(gate) * up) @ weights[f"{mlp}.down_proj.weight"].T
        assert_near(states[layer + 1], hidden, model_error(config, len(tokens)), layer)


@pytest.mark.parametrize(
    ("kv_dtype", "row"), [("auto", 40 * 4), ("bfloat16", 40 * 2), ("int8", 40 + 4), ("fp8", 40 + 4)]
)
def test_a_token_keeps_one_row_for_each_owner(kv_dtype: str, row: int, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", FAMILY, cut=2, group_size=2)
    session = eager_session(path, dataclasses.replace(OPTIONS, kv_dtype=kv_dtype))
    manifest, pools = session.manifest, session.allocate_pools(6)
    assert manifest.model.owners == (0, 1, 2)
    assert manifest.kv_bytes_per_token == 3 * row
    assert device_bytes(manifest, pools) == 6 * OPTIONS.page_size * 3 * row
    assert manifest.model.cached_numbers_of(0) == 40


def test_lites_sizes() -> None:
    """The bytes, scale and parameters of the published model's configuration."""
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707}
    hf = {
        "model_type": FAMILY,
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "max_position_embeddings": 163840,
        "rope_scaling": yarn | {"mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1},
    }
    config = load_config(hf)
    assert config.attention_scale == pytest.approx(0.11472, abs=PRINTED)
    assert (config.rope.amplitude, config.max_position) == (1.0, 163840)
    assert num_parameters(config) == 15_706_484_224
    two_way = load_config(hf | {"num_key_value_layers": 15, "key_value_group_size": 2})
    for each, owners, of_token in ((config, 27, 31104), (two_way, 21, 24192)):
        resolved = resolve(BuildOptions(dtype="bfloat16"), each, "BF16")
        assert resolved.kv_dtype == "bfloat16"
        assert len(each.owners) == owners and 2 * owners * each.kv_dim == of_token
        assert 2 * each.kv_dim == 1152


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_rounded_caches_stay_near_the_reference_with_the_same_cache(kv_dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", FAMILY, cut=2, group_size=2, q_lora_rank=24)
    tokens, config, weights = tokens_of(), config_of(path), load_weights(path)
    exact = reference_logits(config, weights, tokens)
    dtype = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kv_dtype]
    effect = (reference_logits(config, weights, tokens, dtype) - exact).square().mean().sqrt()
    error = (logits(path, tokens, 30, kv_dtype=kv_dtype) - exact).square().mean().sqrt()
    assert 0.5 * effect < error < 2 * effect


@pytest.mark.parametrize(("weight_dtype", "bound"), [("auto", None), ("int8", 0.05), ("int4", 0.4)])
def test_bf16_engines_stay_near_the_reference(weight_dtype: str, bound: float | None, tmp_path: Path) -> None:
    """With routers of zeros, as rounding may send a token to another expert. The bounds are those of other families,
    of weights that are rounded to the nearest."""
    shape = {"num_hidden_layers": 3, "num_experts_per_tok": 8, "q_lora_rank": 24}
    path = make_checkpoint(tmp_path / "c", FAMILY, cut=1, group_size=2, dtype=torch.bfloat16, **shape)
    set_routers_to_zero(path)
    config, tokens = config_of(path), tokens_of()
    expected = reference_logits(config, {name: x.float() for name, x in load_weights(path).items()}, tokens)
    found = logits(path, tokens, 64, weight_dtype=weight_dtype, calibration="none")
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert error < (bound or rounded_model_error(config, torch.bfloat16))


@pytest.mark.parametrize(("name", "dtype"), [("int8", torch.int8), ("int4", IN_STEPS)])
@pytest.mark.parametrize("query_rank", [None, 72])
def test_the_weights_in_memory_are_those_that_are_counted(
    name: str, dtype: torch.dtype, query_rank: int | None, tmp_path: Path
) -> None:
    """With as many experts as fill a panel of the router."""
    shape = {"num_hidden_layers": 4, "n_routed_experts": 64, "num_experts": 64, "q_lora_rank": query_rank}
    path = make_checkpoint(tmp_path / "c", FAMILY, cut=2, group_size=2, dtype=torch.bfloat16, **shape)
    config = config_of(path)
    parameters = convert_weights(
        open_model(path), config, torch.bfloat16, tmp_path / "w", packed_dtype=dtype
    ).num_parameters
    held = sum(tensor.nbytes for key, tensor in load_file(tmp_path / "w").items() if key != FREQUENCIES)
    counted = config
    assert (num_parameters(counted), weight_bytes(counted, name)) == (parameters, held)


@pytest.mark.parametrize("query_rank", [None, 24])
@pytest.mark.parametrize("init", ["copy", "mean", "fold"])
def test_rewired(init: str, query_rank: int | None, tmp_path: Path) -> None:
    """Queries are the teacher's, leaders' keys and values as ``init`` says; without the teacher the rest is whole."""
    source = make_checkpoint(tmp_path / "c", FAMILY, q_lora_rank=query_rank, num_hidden_layers=4)
    options = RewireOptions(cut=2, group_size=2, init=init, drop_teacher=True)
    rewire_checkpoint(source, tmp_path / "out", options)
    checkpoint = open_model(tmp_path / "out")
    config = read_model_config(checkpoint)
    check_weights(checkpoint, config)
    old, new = load_weights(source), load_weights(tmp_path / "out")
    attention = "model.layers.{}.self_attn.{}.weight"
    q = ("q_proj",) if query_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")
    kv = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    added = {attention.format(layer, f"{part}_swiftkv") for layer in (2, 3) for part in q}
    added |= {attention.format(2, f"{part}_swiftkv") for part in kv} | {"model.norm_swiftkv.weight"}
    gone = {attention.format(layer, part) for layer in (2, 3) for part in (*q, *kv)}
    assert set(new) - set(old) == added and set(old) - set(new) == gone
    for part in q:
        assert torch.equal(new[attention.format(3, f"{part}_swiftkv")], old[attention.format(3, part)])
    own, other = ([old[attention.format(layer, part)] for part in kv] for layer in (2, 3))
    if init == "mean":
        own = [(a.double() + b.double()).div(2).float() for a, b in zip(own, other, strict=True)]
    if init == "fold":
        own[0] = (own[0].double() * old["model.layers.2.input_layernorm.weight"].double()).float()
    assert all(torch.equal(new[attention.format(2, f"{part}_swiftkv")], x) for part, x in zip(kv, own, strict=True))
    assert torch.isfinite(reference_logits(config, new, tokens_of(20))).all()


def test_a_cut_without_groups_rewired_by_folding_starts_as_the_teacher_at_its_own_layer(tmp_path: Path) -> None:
    """The first layer above the cut has the same inputs as before, and so the same output."""
    source = make_checkpoint(tmp_path / "c", FAMILY, num_hidden_layers=4)
    rewire_checkpoint(source, tmp_path / "out", RewireOptions(cut=2))
    tokens = tokens_of(30)
    before, after = (reference_hidden(config_of(p), load_weights(p), tokens)[3] for p in (source, tmp_path / "out"))
    assert_near(after, before, model_error(config_of(source), len(tokens)))


@pytest.mark.parametrize("options", [RewireOptions(cut=None), RewireOptions(cut=2, init="ridge")])
def test_what_fits_keys_and_values_is_refused(options: RewireOptions, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "c", FAMILY)
    with pytest.raises(KvforgeError, match="latent attention, whose K and V are not fitted; give a --cut-layer"):
        rewire_checkpoint(source, tmp_path / "out", options)


def test_int4_weights_by_calibration(tmp_path: Path) -> None:
    """An engine in bf16 is the model of the codes. One in int4 rounds what heads have of ``kv_b_proj`` once more, along
    other groups, which changes less than half of what 4 bits did."""
    shape = {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 4, "q_lora_rank": 24}
    path = make_checkpoint(tmp_path / "c", FAMILY, cut=1, group_size=2, dtype=torch.bfloat16, **shape)
    set_routers_to_zero(path)
    quantize_checkpoint(path, tmp_path / "int4", "int4", num_samples=2, num_tokens=256)
    tokens, config, checkpoint = tokens_of(), config_of(path), open_model(tmp_path / "int4")
    weights = {name: x.float() for name, x in load_weights(path).items()}
    rounded = {name: checkpoint.read(name, tuple(x.shape)).float() for name, x in weights.items()}
    exact, expected = (reference_logits(config, each, tokens) for each in (weights, rounded))
    effect = (expected - exact).square().mean().sqrt()
    dequantized, packed = (
        logits(tmp_path / "int4", tokens, 64, dtype="bfloat16", weight_dtype=each) for each in ("auto", "int4")
    )
    assert (dequantized - expected).square().mean().sqrt() < rounded_model_error(config, torch.bfloat16) * exact.std()
    assert (packed - expected).square().mean().sqrt() < effect / 2
    with pytest.raises(CheckpointError, match="no calibrated scales; give --recipe int4"):
        quantize_checkpoint(path, tmp_path / "fp8", "fp8")


LATENT = r"with deepseek_v2 \(latent attention\) one row of a token is K and V of all heads"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "cuda"}, "needs --target cpu, but with target cuda"),
        ({"target": "tensorrt"}, "needs --target cpu, but with target tensorrt"),
        ({"kv_dtype": "int4"}, f"--kv-dtype int4 needs .* {LATENT}; give --kv-dtype int8 where"),
        ({"kv_dtype": "k8v4"}, f"--kv-dtype k8v4 needs .* {LATENT}; give --kv-dtype int8 where"),
        ({"kv_dtype": "kivi2"}, f"--kv-dtype kivi2 needs .* {LATENT}; give --kv-dtype float32"),
        ({"kv_policy": "quest"}, f"--kv-policy quest needs .* {LATENT}; leave --kv-policy out"),
        ({"kv_policy": "shadowkv"}, f"--kv-policy shadowkv needs .* {LATENT}; leave --kv-policy out"),
    ],
)
def test_what_latent_attention_does_not_go_with_is_refused(options: dict[str, Any], message: str) -> None:
    config = load_config({**SMALL, "model_type": FAMILY})
    with pytest.raises(BuildError, match=message):
        resolve(BuildOptions(**options), config, "F32")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' of deepseek_v2 is not supported; it must be .softmax."),
        ({"attention_bias": True}, "attention_bias True of deepseek_v2 is not supported"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported; supported are greedy and group"),
        (IN_GROUPS | {"n_group": 3}, "cannot be chosen in 2 of 3 groups of 8 experts"),
        (IN_GROUPS | {"num_experts_per_tok": 5}, "5 experts for each token cannot be chosen in 2 of 4 groups"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim is 5; rotary position embedding needs an even number"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"q_lora_rank": "x"}, "q_lora_rank, found 'x'"),
        ({"rope_parameters": {**YARN, "mscale_all_dim": "x"}}, "mscale"),
    ],
)
def test_unsupported_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_config({**SMALL, "model_type": FAMILY, **fields})


def test_experts_are_every_so_many_layers_and_normed_ones_are_not_scaled() -> None:
    hf = {**SMALL, "model_type": FAMILY, "num_hidden_layers": 8, "moe_layer_freq": 3}
    experts = load_config(hf).experts
    assert experts is not None and (experts.layers, experts.scaling) == ((3, 6), 1.5)
    normed = load_config(hf | {"norm_topk_prob": True}).experts
    assert normed is not None and (normed.normalize, normed.scaling) == (True, 1.0)


def test_the_config_that_is_read_is_the_one_that_is_saved(tmp_path: Path) -> None:
    """``num_key_value_heads`` and ``head_dim``, which the published code does not read, change nothing."""
    path = make_checkpoint(tmp_path / "c", FAMILY)
    hf = json.loads((path / "config.json").read_text())
    without = {name: value for name, value in hf.items() if name not in ("num_key_value_heads", "head_dim")}
    assert load_config(hf) == load_config(without)
