"""Graphs in pieces: the same results as whole ones, bit for bit, for families, caches and KV policies."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import plugins
from kvforge.common.errors import EngineError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.compiler.export import EXPORTS, lower_example, upper_example
from kvforge.compiler.options import ResolvedOptions, resolve
from kvforge.compiler.pieces import CutGraph, PieceRule, cut_into_pieces, programs_of
from kvforge.compiler.targets import cpu as target
from kvforge.manifest import calls_file, load_calls, load_manifest, package_file, piece_file
from kvforge.runtime import LLMEngine
from kvforge.runtime.sessions.aot_package import load_graph, run_in_turn
from kvforge.runtime.sessions.cpu import load_session
from model_defs import ModelConfig, load_config
from tests.support.models.engines import EngineSpec
from tests.support.models.shelf import EngineShelf
from tests.support.schedules.engine_schedules import random_plan, run_plan
from tests.support.sessions.eager import eager_session
from tests.support.sessions.uncompiled import leave_uncompiled

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CUT = {"model_type": "llama_swiftkv", "swiftkv": True, "num_key_value_layers": 3, "key_value_group_size": 3}
BF16 = BuildOptions(dtype="bfloat16")
HYBRID = {
    **{"full_attention_interval": 3, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4},
    **{"num_experts_per_tok": 2, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16},
}
MODELS: dict[str, tuple[dict[str, Any], BuildOptions, dict[str, int]]] = {
    "llama": ({"model_type": "llama"}, BuildOptions(), {"lower": 3}),  # nothing norms what the last layer gives
    "llama, bf16": ({"model_type": "llama"}, BF16, {"lower": 2}),  # a packed product norms its own input
    "cut": (CUT, BuildOptions(), {"lower": 3, "upper": 4}),
    "cut, bf16": (CUT, BF16, {"lower": 3, "upper": 3}),
    "cut, fp8 cache": (CUT, BuildOptions(kv_dtype="fp8"), {"lower": 3, "upper": 4}),
    "qwen3": ({"model_type": "qwen3", "head_dim": 8}, BuildOptions(), {"lower": 3}),
    "windows in turns": (
        {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 16, "sliding_window_pattern": 2,
         "query_pre_attn_scalar": 8, "rope_local_base_freq": 1e4},
        BuildOptions(),
        {"lower": 4},
    ),
    "mixtral": ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, BF16, {"lower": 2}),
    "linear attention": (HYBRID | {"model_type": "qwen3_next"}, BF16, {"lower": 3}),
    "linear attention, cut": (
        CUT | HYBRID | {"model_type": "qwen3_5_text_swiftkv"}, BuildOptions(), {"lower": 4, "upper": 4}
    ),
    "int8 weights": (CUT, BuildOptions(weight_dtype="int8", dtype="bfloat16"), {"lower": 3, "upper": 3}),
    "streaming": (CUT, BuildOptions(kv_policy="streaming:budget=64"), {"lower": 3, "upper": 4}),
    "quest": (CUT, BuildOptions(kv_policy="quest", page_size=16), {}),
    "kivi2 cache": (CUT | {"head_dim": 32}, BuildOptions(kv_dtype="kivi2", page_size=32), {}),
}  # fmt: skip
"""A model, options, and how many programs its graphs are made of, where that is known."""


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    plugins.load_library()


def resolved(name: str) -> tuple[ModelConfig, ResolvedOptions]:
    changes, options, _ = MODELS[name]
    config = load_config(BASE | changes)
    return config, resolve(dataclasses.replace(options, max_seq_len=128), config, "F32")


def filled(program: ExportedProgram) -> ExportedProgram:
    """Give a program's weights values."""
    torch.manual_seed(3)
    for tensor in program.state_dict.values():
        if tensor.dtype.is_floating_point:
            tensor.data.copy_(torch.randn(tensor.shape) * 0.2)
        else:
            tensor.data.copy_(torch.randint(0, 100, tensor.shape))
    return program


def run_whole(program: ExportedProgram, arguments: tuple[Any, ...]) -> list[Tensor]:
    module = program.module(check_guards=False)
    module._forward_pre_hooks.clear()
    return pytree.tree_leaves(module(*arguments))


def run_pieces(cut: CutGraph, program: ExportedProgram, arguments: tuple[Any, ...]) -> list[Tensor]:
    def graph(name: str, weights: dict[str, str]) -> Callable[[list[Tensor]], list[Tensor]]:
        module = cut.programs[name].module(check_guards=False)
        module._forward_pre_hooks.clear()
        module.load_state_dict({own: program.state_dict[tensor] for own, tensor in weights.items()}, assign=True)
        return lambda inputs: list(module(*inputs))

    parts = [graph(call.package, call.weights) for call in cut.calls.calls]
    return run_in_turn(cut.calls, parts)(pytree.tree_leaves(arguments))


def with_values(graph: str, config: ModelConfig, options: ResolvedOptions) -> Any:
    """A step's arguments: random hidden states and pools, each token its own slot."""
    arguments = {"lower": lower_example, "upper": upper_example}[graph](config, options)
    torch.manual_seed(5)

    def value(tensor: Tensor) -> Tensor:
        if tensor.dtype.is_floating_point:
            return torch.randn(tensor.shape).to(tensor.dtype)
        return tensor.clone()

    arguments = pytree.tree_map_only(Tensor, value, arguments)
    if graph == "lower":
        arguments[2].copy_(torch.randperm(arguments[2].shape[0]))
    if config.linear is not None and graph == "lower":
        read, written = arguments[8:]
        read.copy_(torch.tensor([3, -1, 4]))
        written.fill_(-1)[arguments[3][1:].long() - 1] = torch.tensor([0, 1, 4]).int()
    elif config.upper_linear:
        (rows,) = arguments[-1]
        rows.copy_(torch.arange(len(rows)))
    return arguments


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("graph", ["lower", "upper"])
def test_pieces_give_the_graphs_bits(name: str, graph: str) -> None:
    config, options = resolved(name)
    program = filled(EXPORTS[graph](config, options).program)
    cuts = [cut for cut in (cut_into_pieces(program, num_layers) for num_layers in (1, 2)) if cut is not None]
    expected_programs = MODELS[name][2].get(graph)
    if graph == "upper" and not config.has_cut:
        assert not cuts
        return
    if expected_programs is not None:
        assert cuts, "this graph can be cut"
        assert len(cuts[0].programs) == expected_programs
    with torch.inference_mode():
        given = with_values(graph, config, options)
        first = pytree.tree_map_only(Tensor, torch.clone, given)
        expected = run_whole(program, first)
        for cut in cuts:
            second = pytree.tree_map_only(Tensor, torch.clone, given)
            found = run_pieces(cut, program, second)
            assert len(found) == len(expected)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True)
            ), "the caches differ"


def test_values_are_dropped_after_their_last_use() -> None:
    config, options = resolved("cut")
    calls = cut_into_pieces(EXPORTS["lower"](config, options).program).calls  # type: ignore[union-attr]
    kept = set(range(calls.num_inputs))
    number = calls.num_inputs
    for call, last in zip(calls.calls, calls.last_uses, strict=True):
        assert set(call.inputs) <= kept
        kept |= set(range(number, number + call.num_results))
        number += call.num_results
        kept -= set(last)
    assert kept == set(range(calls.num_inputs)) | set(calls.outputs)


class Layers(nn.Module):
    """Four layers alike; what goes from one to the next is ``between`` of it."""

    def __init__(self, between: Callable[[Tensor], Tensor], returned: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self._between, self._returned = between, returned

    def forward(self, hidden: Tensor) -> Any:
        for layer in self.layers:
            hidden = self._between(layer(hidden))
        return self._returned(hidden)


def export_layers(between: Callable[[Tensor], Tensor], returned: Callable[[Tensor], Any]) -> ExportedProgram:
    return torch.export.export(Layers(between, returned), (torch.randn(8, 8),), strict=False)


def test_a_value_that_is_returned_twice_is_returned_twice() -> None:
    program = export_layers(torch.relu, lambda hidden: (hidden, hidden + 1, hidden))
    cut, arguments = cut_into_pieces(program), (torch.randn(8, 8),)
    assert cut is not None
    for expected, found in zip(run_whole(program, arguments), run_pieces(cut, program, arguments), strict=True):
        assert torch.equal(expected, found)


def test_graphs_are_not_cut_at_transposed_tensors() -> None:
    """A package would read them as if their elements followed each other."""
    assert cut_into_pieces(export_layers(torch.relu, lambda hidden: hidden)) is not None
    assert cut_into_pieces(export_layers(torch.t, lambda hidden: hidden)) is None


def lower_of(num_layers: int) -> ExportedProgram:
    """A graph of layers alike, each of 22,656 bytes and 30 nodes, behind 7 nodes."""
    config = load_config(BASE | MODELS["llama, bf16"][0] | {"num_hidden_layers": num_layers})
    return EXPORTS["lower"](config, resolve(dataclasses.replace(BF16, max_seq_len=128), config, "F32")).program


def test_small_or_few_layers_stay_one_package(tmp_path: Path) -> None:
    program = lower_of(6)
    (tmp_path / "rank0").mkdir()
    for whole in (PieceRule(4 * 22_656, 0), PieceRule(0, 7 + 6 * 30 - (7 + 30))):
        assert [file.name for _, file in programs_of("lower", program, tmp_path, whole)] == ["lower.pt2"]
    assert not (tmp_path / calls_file("lower")).exists()
    two = list(programs_of("lower", program, tmp_path, PieceRule(0, 7 + 6 * 30 - (7 + 30) - 1)))
    assert len(two) == 2 and (tmp_path / calls_file("lower")).is_file()


@pytest.mark.parametrize(
    ("num_layers", "least", "called"),
    [
        (6, 1, [0, 1, 1, 1, 1, 1, 1]),
        (6, 2, [0, 2, 2, 2]),
        (7, 2, [0, 2, 2, 2, 1]),  # of three pieces of two layers and one of one, that one costs least
        (8, 3, [0, 4, 4]),  # of three layers there would be two, and two left
        (3, 2, None),
    ],
)
def test_a_piece_has_as_many_layers_as_weigh_enough(num_layers: int, least: int, called: list[int] | None) -> None:
    cut = PieceRule(least * 22_656 - 1, 1).cut(lower_of(num_layers))
    layers = cut and [sum(name.startswith("layers.") for name in call.weights.values()) for call in cut.calls.calls]
    per_layer = layers and layers[1] // called[1]  # type: ignore[index]
    assert layers == (called and [per_layer * number for number in called])


SPEC = EngineSpec("llama", cut=4, group_size=2, model=(("num_hidden_layers", 8),))


@pytest.fixture
def in_pieces(engines: EngineShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool) -> Path:
    """An engine whose graphs are in pieces; with --full compiled."""
    monkeypatch.setattr(target, "PIECES", PieceRule(1, 1))
    checkpoint = engines.checkpoint(SPEC)
    if not full:
        leave_uncompiled(monkeypatch)
    build_engine(checkpoint, tmp_path / "engine", SPEC.options)
    return tmp_path / "engine"


def test_an_engine_in_pieces_generates_the_same_tokens(in_pieces: Path, engines: EngineShelf) -> None:
    manifest = load_manifest(in_pieces)
    names = {name for name in manifest.files if name.startswith("rank0/")}
    assert {calls_file("lower"), calls_file("upper"), piece_file("lower", "0")} <= names
    assert package_file("lower") not in names and package_file("upper") not in names
    session, whole = load_session(in_pieces, manifest), eager_session(engines.checkpoint(SPEC), SPEC.options)
    for seed in range(3):
        plan = random_plan(seed, page_sizes=(SPEC.options.page_size,), sampled=False)
        expected = run_plan(LLMEngine(session=whole, **plan.limits), plan)
        assert run_plan(LLMEngine(session=session, **plan.limits), plan) == expected


def test_a_damaged_file_of_calls_is_refused(in_pieces: Path) -> None:
    file = in_pieces / calls_file("lower")
    calls = json.loads(file.read_text())
    file.write_text('{"calls": []}')
    with pytest.raises(EngineError, match=r"lower\.json was changed"):
        load_manifest(in_pieces)
    with pytest.raises(EngineError, match=r"lower\.json is damaged"):
        load_graph(in_pieces, "lower", {})
    calls["calls"][0]["weights"]["w0"] = "no.such.weight"
    file.write_text(json.dumps(calls))
    with pytest.raises(EngineError, match=r"needs the weight 'no\.such\.weight'"):
        load_graph(in_pieces, "lower", {})


CALL = {"package": "0", "weights": {"w0": "norm.weight"}, "inputs": [0], "num_results": 1}
CALLS: dict[str, Any] = {"calls": [CALL, CALL | {"inputs": [1]}], "outputs": [2, 2], "num_inputs": 1}


@pytest.mark.parametrize(
    "content",
    [
        [],
        None,
        {},
        CALLS | {"outputs": 5},
        CALLS | {"outputs": [3]},
        CALLS | {"num_inputs": "a"},
        CALLS | {"num_inputs": -1},
        CALLS | {"calls": {"a": 1}},
        *(
            CALLS | {"calls": [CALL | changes], "outputs": [1]}
            for changes in (
                {"package": "../0"},
                {"package": 0},
                {"weights": []},
                {"weights": {"w0": ["norm.weight"]}},
                {"inputs": [-1]},
                {"inputs": [1]},
                {"inputs": [True]},
                {"num_results": None},
                {"more": 1},
            )
        ),
    ],
)
def test_a_file_that_holds_no_calls_is_refused(content: Any, tmp_path: Path) -> None:
    file = tmp_path / "lower.json"
    file.write_text(json.dumps(CALLS))
    assert load_calls(file).outputs == (2, 2)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="it does not say which packages"):
        load_calls(file)
