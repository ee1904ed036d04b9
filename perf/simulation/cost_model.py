"""Seconds of a step from its work: a price for each kind of work, fitted to measured steps."""

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from kvforge.common.errors import KvforgeError
from perf.simulation.work import WORK_NAMES, StepWork


@dataclass(frozen=True)
class CostModel:
    """What the steps of one engine cost, and the facts of the engine that a simulation needs.

    ``prices`` are seconds per unit of each number of ``StepWork``.
    """

    num_layers: int
    cut: int
    page_size: int
    page_bytes: int
    prices: dict[str, float]

    def seconds(self, work: StepWork) -> float:
        """Return how long a step takes."""
        prices = self.prices
        return (
            prices["steps"] * work.steps
            + prices["upper_calls"] * work.upper_calls
            + prices["tokens"] * work.tokens
            + prices["survivors"] * work.survivors
            + prices["query_keys"] * work.query_keys
            + prices["keys_read"] * work.keys_read
        )

    def slower(self, factor: float) -> "CostModel":
        """Return the model of the same engine where every step takes ``factor`` times as long."""
        return replace(self, prices={name: factor * price for name, price in self.prices.items()})


def fit_prices(works: Sequence[StepWork], seconds: Sequence[float]) -> dict[str, float]:
    """Return the prices, none negative, with the least sum of squared relative errors over measured steps."""
    matrix = np.array([astuple(work) for work in works], dtype=np.float64)
    solution = nonnegative_least_squares(matrix / np.asarray(seconds)[:, None], np.ones(len(seconds)))
    return dict(zip(WORK_NAMES, solution.tolist(), strict=True))


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the x >= 0 that minimises |matrix x - target|.

    On the columns that the best x uses it is the plain least-squares solution, so the best of those solutions over
    all sets of columns that have no negative number is it. For a handful of columns that is quick and exact.
    """
    num_columns = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    best, best_error = np.zeros(num_columns), float(target @ target)
    for size in range(1, num_columns + 1):
        for columns in map(list, combinations(range(num_columns), size)):
            part = matrix[:, columns] / scale[columns]
            x = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(np.sum((part @ x - target) ** 2))
            if np.all(x >= 0) and error < best_error:
                best, best_error = np.zeros(num_columns), error
                best[columns] = x / scale[columns]
    return best


def save_costs(costs: dict[str, CostModel], path: Path, fits: dict[str, Any] | None = None) -> None:
    """Write cost models by name, and what is known of how each was fitted; entries of other names stay.

    Raises:
        KvforgeError: the file is another one, or cannot be written.
    """
    old = _read(path) if path.exists() else {"costs": {}, "fits": {}}
    report = {
        "costs": {**old["costs"], **{name: asdict(model) for name, model in costs.items()}},
        "fits": {**old["fits"], **(fits or {})},
    }
    try:
        path.write_text(json.dumps(report, indent=0) + "\n", encoding="utf-8")
    except OSError as error:
        raise KvforgeError(f"{path} cannot be written ({error.strerror}); choose another place.") from None


def load_costs(path: Path) -> dict[str, CostModel]:
    """Read cost models by name.

    Raises:
        KvforgeError: the file cannot be read or holds something else.
    """
    return {name: CostModel(**entry) for name, entry in _read(path)["costs"].items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not data["costs"] or not isinstance(data["fits"], dict):
            raise ValueError("it has no costs")
        for entry in data["costs"].values():
            prices = CostModel(**entry).prices
            if set(prices) != set(WORK_NAMES) or not all(0 <= price < float("inf") for price in prices.values()):
                raise ValueError(f"prices are {', '.join(WORK_NAMES)}, none negative")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise KvforgeError(f"{path} cannot be read as step costs ({error}); write it with --fit.") from None
    return data
