"""Cutting an exported graph into pieces, of which those that are alike are compiled once.

The layers of a model compute the same with other weights. A piece begins where a projection of another layer is first
used: a graph is what comes before the first layer, a piece for each layer or each few, and what follows the last. The
norm before a layer's first projection is in the piece before it: there it is fused with the sum that it norms, as in
one package.
Two pieces are alike when they have the same operations on tensors of the same shapes and dtypes; then one package
serves both, with the weights of each.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from kvforge.compiler.trace import trace
from kvforge.manifest import GraphCalls, PackageCall, calls_file, package_file, piece_file, save_calls

_LAYER = re.compile(r"layers\.(\d+)\.")
_INSIDE = re.compile(r"norm(_\w+)?\.weight$|\.state\.")
"""Weights that begin no piece: what updates states may be behind all layers, for all those above a cut."""


@dataclass
class _Piece:
    """Consecutive nodes, the values and weights that they take from outside, and those of them that others take."""

    nodes: list[fx.Node] = field(default_factory=list)
    inputs: dict[fx.Node, None] = field(default_factory=dict)
    weights: dict[fx.Node, None] = field(default_factory=dict)
    results: dict[fx.Node, None] = field(default_factory=dict)


@dataclass(frozen=True)
class CutGraph:
    """The programs to compile, by name, and how they are called; together they are the graph."""

    programs: dict[str, ExportedProgram]
    calls: GraphCalls


@dataclass(frozen=True)
class PieceRule:
    """When a target cuts graphs. A piece has as many layers as have ``min_bytes`` of weights, so that a step's time in
    it is some hundred times that of a call. A package takes as long to compile as ``package_nodes`` nodes in one."""

    min_bytes: int
    package_nodes: int

    def cut(self, program: ExportedProgram) -> CutGraph | None:
        """Return the pieces of a graph that take least to compile; None where that is the graph as it is."""
        layers = _bytes_of_layers(program)
        least = max(1, -(-self.min_bytes * len(layers) // max(1, sum(layers))))
        found = [_divide(program, number) for number in range(least, min(2 * least, len(layers) // 2) + 1)]
        best = min((one for one in found if one is not None), key=self._cost, default=None)
        whole = self.package_nodes + sum(node.op == "call_function" for node in program.graph.nodes)
        return _export_pieces(best, program) if best is not None and self._cost(best) < whole else None

    def _cost(self, division: "_Division") -> int:
        return sum(len(piece.nodes) + self.package_nodes for piece in division.packages.values())


@dataclass(frozen=True)
class _Division:
    """A graph's pieces, the names of their packages, and the piece that each package is made of. ``weights``: names of
    parameters and buffers by those of their nodes."""

    pieces: list[_Piece]
    names: list[str]
    packages: dict[str, _Piece]
    weights: dict[str, str]


def programs_of(
    name: str, program: ExportedProgram, folder: Path, rule: PieceRule
) -> Iterator[tuple[ExportedProgram, Path]]:
    """Yield the programs of which the graph ``name`` is made, and where their packages belong below ``folder``: the
    graph itself, or those of its pieces, with a file of how they are called."""
    cut = rule.cut(program)
    if cut is None:
        yield program, folder / package_file(name)
        return
    for piece, one in cut.programs.items():
        yield one, folder / piece_file(name, piece)
    save_calls(folder / calls_file(name), cut.calls)


def _bytes_of_layers(program: ExportedProgram) -> list[int]:
    layers: dict[str, int] = {}
    for name, tensor in program.state_dict.items():
        if match := _LAYER.match(name):
            layers[match[1]] = layers.get(match[1], 0) + tensor.nbytes
    return list(layers.values())


def cut_into_pieces(program: ExportedProgram, num_layers: int = 1) -> CutGraph | None:
    """Return the pieces of a graph, of ``num_layers`` layers each; None where it cannot be cut, or has no pieces that
    are alike.

    A graph cannot be cut where anything but tensors goes from one piece to another, or a tensor whose elements do not
    follow each other: a package takes its inputs to lie as those of its examples do.
    """
    division = _divide(program, num_layers)
    return None if division is None else _export_pieces(division, program)


def _divide(program: ExportedProgram, num_layers: int) -> _Division | None:
    weights = _weight_names(program)
    pieces = None if weights is None else _pieces(program.graph, weights, num_layers)
    if weights is None or pieces is None:
        return None
    firsts: dict[str, tuple[str, _Piece]] = {}
    names = [firsts.setdefault(_likeness(piece), (f"{number}", piece))[0] for number, piece in enumerate(pieces)]
    return None if len(firsts) == len(pieces) else _Division(pieces, names, dict(firsts.values()), weights)


def _export_pieces(division: _Division, program: ExportedProgram) -> CutGraph:
    programs = {name: _export(piece, program, division.weights) for name, piece in division.packages.items()}
    return CutGraph(programs, _calls(program, division))


def _weight_names(program: ExportedProgram) -> dict[str, str] | None:
    """Return the names of parameters and buffers by those of their nodes; None where there are other constants."""
    kinds = {InputKind.PARAMETER, InputKind.BUFFER}
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind != InputKind.USER_INPUT]
    if not all(spec.kind in kinds and spec.target for spec in specs):
        return None
    return {spec.arg.name: str(spec.target) for spec in specs}


def _pieces(graph: fx.Graph, weights: dict[str, str], num_layers: int) -> list[_Piece] | None:
    pieces, current, begun = [_Piece()], "begin", 0  # or a layer's number, or "end"; how many layers have begun
    home: dict[fx.Node, int] = {}
    owners = {node: _owner(node, weights) for node in graph.nodes}
    of_layers = [node for node, owner in owners.items() if owner not in (None, "other")]
    last = of_layers[-1] if of_layers else None
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function":
            return None
        owner = owners[node]
        if owner == "other":  # what layers share begins nothing
            owner = "end" if last is not None and node > last else None
        if owner is not None and owner != current:
            if owner == "end" or begun % num_layers == 0:
                pieces.append(_Piece())
            current = owner
            begun += 1
        home[node] = len(pieces) - 1
        pieces[-1].nodes.append(node)
    for node in graph.nodes:
        for source in node.all_input_nodes:
            here = None if node.op == "output" else home.get(node)
            if source.op == "placeholder":
                if here is not None:
                    taken = pieces[here].weights if source.name in weights else pieces[here].inputs
                    taken[source] = None
            elif home[source] != here:
                pieces[home[source]].results[source] = None
                if here is not None:
                    pieces[here].inputs[source] = None
    crossing = [value for piece in pieces for value in (*piece.inputs, *piece.results)]
    is_plain = all(_is_plain(value.meta.get("val")) for value in crossing)
    returned = all(isinstance(value, fx.Node) and value.name not in weights for value in _returned(graph))
    return pieces if is_plain and returned else None


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_contiguous()


def _returned(graph: fx.Graph) -> list[Any]:
    """Return what a graph returns, in order; a value may be there twice."""
    return pytree.tree_leaves(graph.output_node().args[0])


def _owner(node: fx.Node, weights: dict[str, str]) -> str | None:
    """Return the layer whose projections a node uses, "other" for weights of no layer, None where there are neither."""
    names = [weights[source.name] for source in node.all_input_nodes if source.name in weights]
    names = [name for name in names if not _INSIDE.search(name)]
    if not names:
        return None
    match = _LAYER.match(names[0])
    return match[1] if match else "other"


def _likeness(piece: _Piece) -> str:
    """Return what pieces that are alike have in common."""
    number: dict[fx.Node, str] = {node: f"n{index}" for index, node in enumerate(piece.nodes)}
    number |= {node: f"i{index}" for index, node in enumerate(piece.inputs)}
    number |= {node: f"w{index}" for index, node in enumerate(piece.weights)}
    outside = [_description(node) for node in (*piece.inputs, *piece.weights)]
    inside = [
        (str(node.target), fx.map_arg((node.args, node.kwargs), lambda source: _Named(number[source])))
        for node in piece.nodes
    ]
    return repr((outside, inside, [number[node] for node in piece.results]))


@dataclass(frozen=True, repr=False)
class _Named:
    name: str

    def __repr__(self) -> str:
        return self.name


def _description(node: fx.Node) -> tuple[Any, ...]:
    value: Tensor = node.meta["val"]
    return value.dtype, tuple("dynamic" if _is_dynamic(size) else int(size) for size in value.shape)


def _is_dynamic(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def _export(piece: _Piece, program: ExportedProgram, weights: dict[str, str]) -> ExportedProgram:
    """Export a piece alone. Its examples have the sizes of the graph's own, which are pairwise different."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(piece.inputs):
        copies[node] = graph.placeholder(f"i{index}")
    module = nn.Module()
    for index, node in enumerate(piece.weights):
        tensor = program.state_dict[weights[node.name]]
        module.register_buffer(f"w{index}", tensor.detach())
        copies[node] = graph.get_attr(f"w{index}")
    for node in piece.nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in piece.results))
    examples = tuple(_example(node.meta["val"]) for node in piece.inputs)
    dynamic = tuple(
        {dim: Dim.DYNAMIC for dim, size in enumerate(node.meta["val"].shape) if _is_dynamic(size)}
        for node in piece.inputs
    )
    return trace(fx.GraphModule(module, graph), examples, dynamic)


def _example(value: Tensor) -> Tensor:
    sizes = [size.node.hint if _is_dynamic(size) else int(size) for size in value.shape]
    return torch.zeros(sizes, dtype=value.dtype, device=value.device)


def _calls(program: ExportedProgram, division: _Division) -> GraphCalls:
    weights = division.weights
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder" and node.name not in weights]
    number = {node: index for index, node in enumerate(placeholders)}
    calls = []
    for piece, name in zip(division.pieces, division.names, strict=True):
        inputs = tuple(number[node] for node in piece.inputs)
        own = {f"w{index}": weights[node.name] for index, node in enumerate(piece.weights)}
        for node in piece.results:
            number[node] = len(number)
        calls.append(PackageCall(name, own, inputs, len(piece.results)))
    return GraphCalls(tuple(calls), tuple(number[node] for node in _returned(program.graph)), len(placeholders))
