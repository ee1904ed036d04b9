"""Graphs made of packed linear layers, not compiled, against the all-token reference: families and weight dtypes."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

import plugins
from kvforge.checkpoint import open_checkpoint
from kvforge.compiler.convert import EMBEDDING, convert_weights
from kvforge.compiler.cpu_graph import is_rotated, linears, pack_linears
from kvforge.compiler.stream_basis import StreamBasis, rotate
from model_defs import ModelConfig, load_config
from model_defs.graphs import EarlyExitGraph, LowerGraph, UpperGraph
from model_defs.layers import Linear, RMSNorm
from model_defs.reference import reference_early_exit, reference_logits
from plugins.kv_quantization import dynamic_scale, quantize
from plugins.packed_linear.int4 import round_to_codes
from plugins.packed_linear.int4_steps import round_in_steps
from plugins.packed_linear.packing import IN_STEPS, rotated_rows
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.rounding import rounded_model_error

PAGE_SIZE, TOKENS = 8, 40
MODELS = {
    "llama, biases, early exit": ("llama", 1, 2, {"attention_bias": True, "mlp_bias": True, "early_exit": True}),
    "mistral, no cut, window": ("mistral", None, 1, {"sliding_window": 24}),
    "qwen2, sizes that panels do not divide": ("qwen2", 2, 1, {"intermediate_size": 90, "vocab_size": 333}),
    "qwen3, tied": ("qwen3", 1, 1, {"tie_word_embeddings": True}),
}


@dataclass(frozen=True)
class Model:
    """A random model of 3 layers: as the reference takes it, in float32, and its checkpoint in bf16."""

    config: ModelConfig
    weights: dict[str, Tensor]
    path: Path


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, cut, group_size, settings = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    path = make_checkpoint(
        folder, family, cut=cut, group_size=group_size, dtype=torch.bfloat16, num_hidden_layers=3, **settings
    )
    config = load_config(json.loads((path / "config.json").read_text()))
    return Model(config, {name: tensor.float() for name, tensor in load_weights(path).items()}, path)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    plugins.load_library()


def converted(model: Model, weight_dtype: torch.dtype | None, int8_layers: Collection[str] = ()) -> dict[str, Tensor]:
    """The engine's weights, as the memory-mapped file holds them; not packed without a dtype."""
    path = model.path / f"{weight_dtype}{len(int8_layers)}.safetensors"
    settings = {"packed_dtype": weight_dtype, "int8_layers": int8_layers}
    convert_weights(open_checkpoint(model.path), model.config, torch.bfloat16, path, **settings)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def in_basis(model: Model, weights: dict[str, Tensor], is_head: bool) -> dict[str, Tensor]:
    """Plain weights in the basis that those of an int8 or int4 engine have, which quantizes linear layers from float32;
    ``is_head``: the embedding as the head."""
    basis = StreamBasis(model.config, lambda spec: weights[spec.name])
    found = {}
    for name, tensor in weights.items():
        change = basis.change(name, is_head and name == EMBEDDING)
        is_linear = tensor.dim() == 2 and (is_head or name != EMBEDDING)
        if change is not None:
            found[name] = change(tensor) if is_linear else change(tensor).bfloat16()
    return weights | found


def graph(
    module: nn.Module, weights: dict[str, Tensor], weight_dtype: torch.dtype | None, int8_layers: Collection[str] = ()
) -> nn.Module:
    for name, layer in module.named_modules():
        layer.own_name = name
    if weight_dtype is not None:
        pack_linears(module, weight_dtype, int8_layers)
    module.load_state_dict({name: weights[name] for name in module.state_dict()}, assign=True)
    return module


def logits(
    model: Model,
    weight_dtype: torch.dtype | None,
    like: torch.dtype | None = None,
    seed: int = 3,
    int8_layers: Collection[str] = (),
) -> list[Tensor]:
    """Logits of every token, then those of the early exit where there is one, from one step of all tokens; by plain
    weights in the basis of an engine ``like`` that."""
    config, tokens, weights = model.config, prompt(seed), converted(model, weight_dtype, int8_layers)
    of_head = weights
    if like in (torch.int8, IN_STEPS):
        of_head, weights = (in_basis(model, weights, is_head) for is_head in (True, False))
    pages = -(-TOKENS // PAGE_SIZE)
    shape = (pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    pools = [(torch.zeros(shape).bfloat16(), torch.zeros(shape).bfloat16()) for _ in config.owners]
    starts, length = torch.tensor([0, TOKENS]).int(), torch.tensor([TOKENS]).int()
    table, rows = torch.arange(pages).int()[None], torch.arange(TOKENS).int()
    packed = weight_dtype, int8_layers
    lower = graph(LowerGraph(config), weights, *packed)
    hidden = lower(tokens.int(), rows, rows, starts, length, table, pools)
    upper = graph(UpperGraph(config), of_head, *packed)
    results = [upper(hidden, rows, starts, rows, length, table, pools[config.cut :])]
    if config.early_exit:
        results.append(graph(EarlyExitGraph(config), weights, *packed)(hidden, rows))
    return results


def rounded(layer: Linear, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weight that packing it as int8 or int4 leaves, and what its outputs are multiplied with; a head in 4 bits
    keeps scales."""
    weight = layer.weight.float()
    weight = rotated_rows(weight) if is_rotated(layer, weight_dtype) else weight
    if weight_dtype == IN_STEPS:
        return (round_to_codes(weight) if layer.is_head else round_in_steps(weight)).dequantize(), torch.ones(1)
    scale = dynamic_scale(weight, torch.int8)
    return quantize(weight, scale[:, None], torch.int8), scale


def rounded_forward(
    weight_dtype: torch.dtype, layer: Linear, x: Tensor, norm: RMSNorm | None = None, residual: Tensor | None = None
) -> Tensor:
    """What the layer computes with a quantized weight: a scale for each row of x, exact sums, one rounding at the
    end."""
    x = x if norm is None else norm(x)
    x = rotated_rows(x).to(x.dtype) if is_rotated(layer, weight_dtype) else x
    x_scale = dynamic_scale(x, torch.int8)[:, None]
    weight, scale = rounded(layer, weight_dtype)
    sums = quantize(x, x_scale, torch.int8).double() @ weight.double().T
    y = sums.float() * x_scale * scale
    if layer.bias is not None:
        y = y + layer.bias.float()
    if layer.gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    if residual is not None:
        y = y + residual.float()
    return y if layer.float32_out else y.to(x.dtype)


def prompt(seed: int = 3) -> Tensor:
    return torch.randint(3, 320, (TOKENS,), generator=torch.Generator().manual_seed(seed))


def references(model: Model, seed: int = 3) -> list[Tensor]:
    results = [reference_logits(model.config, model.weights, prompt(seed))]
    if model.config.early_exit:
        results.append(reference_early_exit(model.config, model.weights, prompt(seed)))
    return results


PROMPTS = range(3, 12)
"""Seeds of prompts whose logits are compared."""
SMALL = {torch.int8: 0.05, IN_STEPS: 0.4}
"""What quantized weights and inputs change of the logits. With int8 each is off by half of 1/127 of its row's largest
at most, 0.2% of it on average, and a layer has four products of two such operands: 3 layers move by about sqrt(24)
times that, 1%. An int4 weight is off by 8% on average, and 12 products with such weights move by sqrt(12) times that,
28%."""


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).square().mean().sqrt() / expected.std())


@torch.inference_mode()
def test_bf16_is_the_reference_but_for_rounding(model: Model) -> None:
    for found, expected in zip(logits(model, torch.bfloat16), references(model), strict=True):
        assert error(found, expected) < rounded_model_error(model.config, torch.bfloat16)


@pytest.mark.parametrize(("weight_dtype", "is_mixed"), [(torch.int8, False), (IN_STEPS, False), (IN_STEPS, True)])
@torch.inference_mode()
def test_quantized_is_the_plain_graph_with_rounded_weights_and_inputs(
    model: Model, weight_dtype: torch.dtype, is_mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bias, gate and residual of each layer are where the plain graph has them, and each weight where its name says:
    far nearer than what quantizing changes, which is small itself. Not of every prompt: where attention rounds
    otherwise, a code may turn, and one turned code moves as much as a quarter of that; tiles turn more of them. Mixed:
    some layers of each kind are int8, the head among them."""
    names = list(linears(model.config))
    int8_layers = {*names[:3], *names[6::2], *({"embed", "lm_head"} & {*names})} if is_mixed else set()
    packed = [logits(model, weight_dtype, seed=seed, int8_layers=int8_layers) for seed in PROMPTS]

    def forward(layer: Linear, *args: Any, **kwargs: Any) -> Tensor:
        return rounded_forward(torch.int8 if layer.own_name in int8_layers else weight_dtype, layer, *args, **kwargs)

    monkeypatch.setattr(Linear, "forward", forward)
    shares = []
    for seed, results in zip(PROMPTS, packed, strict=True):
        for found, expected, exact in zip(
            results, logits(model, None, weight_dtype, seed), references(model, seed), strict=True
        ):
            assert error(expected, exact) < SMALL[weight_dtype]
            shares.append(error(found, expected) / error(expected, exact))
    quarter, half, _ = quantiles(shares, n=4)
    assert quarter < 1 / 16 and half < 1 / 4, shares
    assert max(shares) < 1, shares


@pytest.mark.parametrize(("weight_dtype", "stored"), [(torch.int8, torch.int8), (IN_STEPS, torch.uint8)])
def test_packed_weights_are_aligned_and_the_lookup_is_plain(
    model: Model, weight_dtype: torch.dtype, stored: torch.dtype
) -> None:
    weights = converted(model, weight_dtype)
    for name in linears(model.config):
        packed, scales = weights[f"{name}.packed"], weights[f"{name}.scales"]
        assert packed.dtype == stored and packed.data_ptr() % 64 == scales.data_ptr() % 64 == 0
        assert f"{name}.weight" not in weights or name == "embed"
    table = model.weights["model.embed_tokens.weight"]
    assert torch.equal(weights["embed.weight"], rotate(table).bfloat16())
