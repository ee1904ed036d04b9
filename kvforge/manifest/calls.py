"""How a graph that is compiled in pieces is run: a file beside the packages, ``rank0/GRAPH.json``.

Values are numbered: the graph's flat inputs first, then the results of each call, in order.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvforge.common.records import RecordError, read_record
from kvforge.manifest.manifest import RANK_DIR


@dataclass(frozen=True)
class PackageCall:
    """One call of a package: ``weights`` are engine tensors by the package's names, ``inputs`` numbers of values."""

    package: str
    weights: dict[str, str]
    inputs: tuple[int, ...]
    num_results: int


@dataclass(frozen=True)
class GraphCalls:
    """The calls of a graph with ``num_inputs`` flat inputs, and the numbers of the values that it returns."""

    calls: tuple[PackageCall, ...]
    outputs: tuple[int, ...]
    num_inputs: int

    @property
    def last_uses(self) -> tuple[tuple[int, ...], ...]:
        """For each call the values that no later call and no output needs, inputs of the graph left out."""
        seen, dropped = set(self.outputs), []
        for call in reversed(self.calls):
            ended = [value for value in dict.fromkeys(call.inputs) if value >= self.num_inputs and value not in seen]
            seen.update(ended)
            dropped.append(tuple(ended))
        return tuple(reversed(dropped))


def calls_file(graph: str) -> str:
    """Return where the calls of a graph in pieces lie in an engine; a graph that is one package has no such file."""
    return f"{RANK_DIR}/{graph}.json"


def piece_file(graph: str, package: str) -> str:
    """Return where one of the packages of a graph in pieces lies in an engine."""
    return f"{RANK_DIR}/{graph}.{package}.pt2"


def save_calls(path: Path, calls: GraphCalls) -> None:
    """Write them."""
    path.write_text(json.dumps(dataclasses.asdict(calls)) + "\n")


def load_calls(path: Path) -> GraphCalls:
    """Read them.

    Raises:
        OSError: there is no such file.
        ValueError: it is damaged.
    """
    data = json.loads(path.read_text())
    try:
        read = read_record(GraphCalls, data)
    except RecordError:
        read = None
    if read is None or not _is_whole(read):
        raise ValueError("it does not say which packages are called with which values")
    return read


def _is_whole(read: GraphCalls) -> bool:
    """Whether each value is there before it is used."""
    known = read.num_inputs
    for call in read.calls:
        if not call.package.isdecimal() or call.num_results < 0 or not _are_below(call.inputs, known):
            return False
        known += call.num_results
    return read.num_inputs >= 0 and _are_below(read.outputs, known)


def _are_below(values: Sequence[int], end: int) -> bool:
    return all(0 <= value < end for value in values)
