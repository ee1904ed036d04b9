"""The graphs with every cache format against the all-token reference with the same cache, on the operators' definitions
(no kernel, no compilation)."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import plugins
from kvforge.checkpoint import open_checkpoint
from kvforge.compiler.convert import convert_weights
from model_defs import ModelConfig, load_config
from model_defs.graphs import LowerGraph, UpperGraph
from model_defs.reference import reference_logits
from plugins.kv_quantization import stored_dim
from tests.support.models.checkpoints import load_weights, make_checkpoint

PAGE_SIZE, TOKENS, CHUNKS = 8, 40, (7, 23, 1, 1, 8)
STATIC = ((0.011, 0.02), (0.012, 0.015), (0.013, 0.01), (0.02, 0.012))
"""Scales of the owners 0, 1, 2 and 4, all different, so that no two can be exchanged."""

FORMATS = {
    "bfloat16": (torch.bfloat16, ()),
    "fp8": (torch.float8_e4m3fn, ()),
    "int8": (torch.int8, ()),
    "int8, keys rotated": (torch.int8, ()),
    "int4": (torch.uint8, ()),
    "k8v4": ((torch.int8, torch.uint8), ()),
    "fp8_static": (torch.float8_e4m3fn, STATIC),
    "int8_static": (torch.int8, tuple((4 * k, 4 * v) for k, v in STATIC)),
}


@dataclass(frozen=True)
class Model:
    """A random SwiftKV model of 5 layers, cut at 2, in groups of 2: as the reference and as the graphs take it."""

    config: ModelConfig
    weights: dict[str, Tensor]
    engine_weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_checkpoint(tmp_path_factory.mktemp("model") / "m", cut=2, group_size=2, num_hidden_layers=5)
    config = load_config(json.loads((path / "config.json").read_text()))
    weights = load_weights(path)
    convert_weights(open_checkpoint(path), config, torch.float32, path / "engine")
    return Model(config, weights, load_file(path / "engine"))


@pytest.fixture(autouse=True)
def definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the graphs run the operators' references."""
    write, attend = (plugins.OPERATORS[name].reference for name in ("rope_paged_kv_write", "paged_attention"))

    def write_and_return(k, v, cos, sin, slot_mapping, *pool, **scales):
        write(k, v, cos, sin, slot_mapping, *pool, **scales)
        return pool

    monkeypatch.setattr("model_defs.graphs.rope_paged_kv_write", write_and_return)
    monkeypatch.setattr("model_defs.layers.paged_attention", attend)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def graph_logits(
    model: Model,
    tokens: Tensor,
    kv_dtype: torch.dtype | tuple[torch.dtype, ...],
    kv_scales: tuple,
    rotates_keys: bool = False,
) -> Tensor:
    """Logits of every token, in chunks, from the two graphs."""
    config = model.config
    lower, upper = (kind(config, kv_scales, rotates_keys=rotates_keys) for kind in (LowerGraph, UpperGraph))
    lower.returns_pools = True
    for graph in (lower, upper):
        graph.load_state_dict({name: model.engine_weights[name] for name in graph.state_dict()})
    shape = (-(-TOKENS // PAGE_SIZE), PAGE_SIZE, config.num_kv_heads, config.head_dim)
    dtypes = kv_dtype if isinstance(kv_dtype, tuple) else (kv_dtype, kv_dtype)
    dynamic = dtypes[0].itemsize == 1 and not kv_scales
    pools = [
        tuple(torch.zeros(*shape[:3], stored_dim(config.head_dim, dtype), dtype=dtype) for dtype in dtypes)
        + tuple(torch.full(shape[:3], float("nan")) for _ in "kv" if dynamic)
        for _ in config.owners
    ]
    page_table = torch.arange(shape[0], dtype=torch.int32).flip(0)[None]
    logits, start = [], 0
    for count in CHUNKS:
        positions = torch.arange(start, start + count)
        slots = page_table[0, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        start += count
        queries, length = int32(0, count), int32(start)
        step = (positions.int(), slots.int(), queries, length, page_table)
        hidden, *written = lower(tokens[positions].int(), *step, pools)
        assert [tensor.data_ptr() for tensor in written] == [tensor.data_ptr() for pool in pools for tensor in pool]
        rows = torch.arange(count, dtype=torch.int32)
        logits.append(upper(hidden, rows, queries, positions.int(), length, page_table, pools[config.cut :]))
    return torch.cat(logits)


@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_graphs_equal_the_reference_with_the_same_cache(name: str, model: Model) -> None:
    """Both round the same numbers, up to float32's own error, so they agree far better than either does with an
    exact cache. Where that error turns a rounding, one element in thousands is a step off, which later tokens see:
    the mean error stays a small part of the cache's mean effect."""
    (kv_dtype, kv_scales), rotates = FORMATS[name], "rotated" in name
    tokens = torch.randint(3, 320, (TOKENS,), generator=torch.Generator().manual_seed(3))
    exact = reference_logits(model.config, model.weights, tokens)
    expected = reference_logits(model.config, model.weights, tokens, kv_dtype, kv_scales, rotates_keys=rotates)
    effect = (expected - exact).square().mean().sqrt()
    error = (graph_logits(model, tokens, kv_dtype, kv_scales, rotates) - expected).square().mean().sqrt()
    assert error < effect / 10
    assert 1e-4 < effect / exact.std() < 0.2


@pytest.mark.parametrize("exchanged", [(1, 0, 2, 3), (0, 1, 3, 2)])
def test_another_owners_scales_are_noticed(exchanged: tuple[int, ...], model: Model) -> None:
    kv_dtype, kv_scales = FORMATS["int8_static"]
    tokens = torch.randint(3, 320, (TOKENS,), generator=torch.Generator().manual_seed(3))
    expected = reference_logits(model.config, model.weights, tokens, kv_dtype, kv_scales)
    wrong = graph_logits(model, tokens, kv_dtype, tuple(kv_scales[i] for i in exchanged))
    assert (wrong - expected).abs().max() / expected.abs().max() > 1e-3


def test_one_scale_pair_per_owner_is_needed(model: Model) -> None:
    with pytest.raises(ValueError):
        LowerGraph(model.config, STATIC[:3])
