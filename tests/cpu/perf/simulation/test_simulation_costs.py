"""Prices of steps: fitted to measurements, none negative; written and read."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvforge.common.errors import KvforgeError
from perf.simulation.cost_model import CostModel, fit_prices, load_costs, nonnegative_least_squares, save_costs
from perf.simulation.work import StepWork
from tests.support.rounding import sum_error

PRICES = {"steps": 0.01, "upper_calls": 0.005, "tokens": 5e-4, "survivors": 1e-3, "query_keys": 1e-9, "keys_read": 2e-8}
MODEL = CostModel(16, 8, 32, 16384, PRICES)


def random_works(rng: np.random.Generator, num: int) -> list[StepWork]:
    works = []
    for _ in range(num):
        tokens, survivors, keys = (int(rng.integers(low, high)) for low, high in ((1, 2048), (0, 64), (1, 10**6)))
        survivors *= int(rng.integers(0, 2))
        works.append(StepWork(1, int(survivors > 0), tokens, survivors, keys * tokens // 2, keys))
    return works


def test_exact_measurements_give_the_prices_back() -> None:
    works = random_works(np.random.default_rng(0), 60)
    fitted = fit_prices(works, [MODEL.seconds(work) for work in works])
    assert fitted == pytest.approx(PRICES)


NOISE = 0.5
"""40 steps whose times are off by 20% tell a price to about 0.2 / sqrt(40) = 3% where it is alone; it shares them with
five prices that are correlated with it, some ten times less certain."""


def test_noise_does_not_make_a_price_negative() -> None:
    rng = np.random.default_rng(1)
    works = random_works(rng, 40)
    seconds = [MODEL.seconds(work) * rng.lognormal(0, 0.2) for work in works]
    fitted = fit_prices(works, seconds)
    assert min(fitted.values()) >= 0
    assert fitted["tokens"] == pytest.approx(PRICES["tokens"], rel=NOISE)


@pytest.mark.parametrize("seed", range(8))
def test_nonnegative_least_squares_is_optimal(seed: int) -> None:
    """The problem is convex: x is the minimum where no allowed direction goes down (Karush-Kuhn-Tucker)."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(30, 6)), rng.normal(size=30)
    x = nonnegative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ x - target)
    assert (x >= 0).all() and (x > 0).any()
    sizes = np.abs(matrix).T @ (np.abs(matrix) @ x + np.abs(target))
    # The solution rounds by its condition number, below 10 here, and then the gradient does.
    rounding = 10 * sum_error(6, 30, dtype=torch.float64) * sizes.max()
    assert np.abs(gradient[x > 0]).max() <= rounding and (gradient >= -rounding).all()


def test_costs_are_read_as_written_and_others_stay(tmp_path: Path) -> None:
    path, other = tmp_path / "costs.json", CostModel(16, 16, 32, 16384, {**PRICES, "steps": 0.0})
    save_costs({"cut 8": MODEL}, path)
    save_costs({"no cut": MODEL}, path, {"no cut": {"num_steps": 3}})
    save_costs({"no cut": other}, path)
    assert load_costs(path) == {"cut 8": MODEL, "no cut": other}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"costs": {"a": {}}, "fits": {}}', '{"costs": {}, "fits": {}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(KvforgeError, match="write it with --fit"):
        load_costs(tmp_path / "costs.json")
    with pytest.raises(KvforgeError, match="write it with --fit"):
        save_costs({"cut 8": MODEL}, tmp_path / "costs.json")
    assert (tmp_path / "costs.json").read_text() == text


@pytest.mark.parametrize("prices", [{**PRICES, "steps": -1.0}, {**PRICES, "steps": "1"}, {"steps": 1.0}])
def test_wrong_prices_are_refused(tmp_path: Path, prices: dict) -> None:
    save_costs({"a": CostModel(16, 8, 32, 16384, prices)}, tmp_path / "costs.json")
    with pytest.raises(KvforgeError, match="cannot be read as step costs"):
        load_costs(tmp_path / "costs.json")
