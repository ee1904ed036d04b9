"""How a graph that is compiled in pieces is run: a file beside the packages, ``rank0/GRAPH.json``.

Values are numbered: the graph's flat inputs first, then the results of each call, in order.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.manifest.manifest import RANK_DIR


@dataclass(frozen=True)
class Call:
    """One call of a package: ``weights`` are engine tensors by the package's names, ``inputs`` numbers of values."""

    package: str
    weights: dict[str, str]
    inputs: tuple[int, ...]
    num_results: int


@dataclass(frozen=True)
class Calls:
    """The calls of a graph with ``num_inputs`` flat inputs, and the numbers of the values that it returns."""

    calls: tuple[Call, ...]
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


def save_calls(path: Path, calls: Calls) -> None:
    """Write them."""
    path.write_text(json.dumps(dataclasses.asdict(calls)) + "\n")


def load_calls(path: Path) -> Calls:
    """Read them.

    Raises:
        OSError: there is no such file.
        ValueError: it is damaged.
    """
    read = json.loads(path.read_text())
    if not _is_whole(read):
        raise ValueError("it does not say which packages are called with which values")
    calls = tuple(Call(**{**each, "inputs": tuple(each["inputs"])}) for each in read["calls"])
    return Calls(calls, tuple(read["outputs"]), read["num_inputs"])


def _is_whole(read: Any) -> bool:
    """Whether what was read is a ``Calls`` each of whose values is there before it is used."""
    if not isinstance(read, dict) or read.keys() != {"calls", "outputs", "num_inputs"}:
        return False
    calls, known = read["calls"], read["num_inputs"]
    if not isinstance(calls, list) or not _is_count(known):
        return False
    for call in calls:
        if not isinstance(call, dict) or call.keys() != {field.name for field in dataclasses.fields(Call)}:
            return False
        weights, package = call["weights"], call["package"]
        if not isinstance(package, str) or not package.isdecimal() or not _is_count(call["num_results"]):
            return False
        if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
            return False
        if not _are_numbers_below(call["inputs"], known):
            return False
        known += call["num_results"]
    return _are_numbers_below(read["outputs"], known)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_numbers_below(values: Any, end: int) -> bool:
    return isinstance(values, list) and all(_is_count(value) and value < end for value in values)
