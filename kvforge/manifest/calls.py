"""How a graph that is compiled in pieces is run: a file beside the packages, ``rank0/GRAPH.json``.

Values are numbered: the graph's flat inputs first, then the results of each call, in order.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

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
    try:
        read = json.loads(path.read_text())
        calls = tuple(Call(**{**each, "inputs": tuple(each["inputs"])}) for each in read["calls"])
        return Calls(calls, tuple(read["outputs"]), read["num_inputs"])
    except (KeyError, TypeError) as error:
        raise ValueError(str(error)) from error
