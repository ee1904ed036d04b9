"""An engine and the simulator serve the same workloads: what is compared, and the curves that are drawn of it."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvforge.common.errors import KvforgeError
from kvforge.runtime.engine import LLMEngine
from perf.simulation import simulate
from perf.simulation.arrivals import Traffic
from perf.simulation.cost_model import CostModel, save_costs
from perf.simulation.measure import Design, Sample, StepMeter, slowness
from perf.simulation.plots import CURVES
from perf.simulation.validation import Times, validate
from perf.simulation.workloads import ARRIVING, LENGTHS, LOADS, workloads
from tests.support.models.small_models import small_session

DECIMALS = 1e-3
"""Rates are rounded to as much."""
PRICES = {"steps": 0.002, "upper_calls": 1e-3, "tokens": 1e-5, "survivors": 1e-4, "query_keys": 0.0, "keys_read": 0.0}


def small_engine() -> LLMEngine:
    return LLMEngine(session=small_session({}), enable_prefix_cache=False, num_pages=64)


def costs_of(engine: LLMEngine) -> CostModel:
    manifest = engine.manifest
    return CostModel(manifest.model.num_layers, manifest.model.cut, manifest.page_size, manifest.page_bytes, PRICES)


def test_times_are_means_over_requests() -> None:
    arrival, first, last = np.array([0.0, 1.0]), np.array([2.0, 2.0]), np.array([4.0, 7.0])
    assert Times.of(Traffic(2, 5, 3), arrival, first, last) == Times(total=7.0, ttft=1.5, tpot=1.75)


def test_a_workload_is_served_and_simulated_and_one_that_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = small_engine()
    paces = iter([9.0, 2.0, 4.0, 1.0, 2.0])  # the first one warms up
    monkeypatch.setattr("perf.simulation.validation.slowness", lambda meter, costs: next(paces))
    chosen = {"one": Traffic(1, 8, 2), "some": Traffic(3, 20, 4, rate=200.0), "too long": Traffic(1, 1000, 4)}
    rows = validate(engine, costs_of(engine), chosen, rounds=1)
    assert [row["workload"] for row in rows] == ["one", "some"]
    assert rows[0]["simulated_total_s"] == pytest.approx(3 * (2 * (2e-3 + 1e-3 + 1e-4) + 9e-5))
    assert [row["slowness"] for row in rows] == [[2.0, 4.0], [1.0, 2.0]]
    assert not engine.has_unfinished()
    for row in rows:
        assert 0 < row["measured_ttft_s"] <= row["measured_total_s"]
        assert row["total_error"] == row["simulated_total_s"] / row["measured_total_s"] - 1


def test_of_several_rounds_the_one_in_the_middle_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, served = small_engine(), iter([9.0, 1.0, 2.0, 4.0])  # the first one warms up
    monkeypatch.setattr("perf.simulation.validation.slowness", lambda meter, costs: 1.0)
    monkeypatch.setattr("perf.simulation.validation.serve", lambda *args: Times(next(served), 0.5, 0.1))
    (row,) = validate(engine, costs_of(engine), {"one": Traffic(1, 8, 2)}, rounds=3)
    assert row["measured_total_s"] == 2.0


def test_how_slow_a_machine_is_follows_from_steps_of_known_price(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine()
    meter, costs = StepMeter(engine), costs_of(engine)
    monkeypatch.setattr("perf.simulation.measure.REFERENCE_DESIGNS", (Design(1, 16), Design(0, 0, 20), Design(2, 9)))
    measure = meter.measure

    def twice_as_long(design: Design) -> Sample:
        work = measure(design).work
        return Sample(work, (3.0 if design.chunk else 2.0) * costs.seconds(work))

    monkeypatch.setattr(meter, "measure", twice_as_long)
    assert slowness(meter, costs) == pytest.approx(2.0)
    monkeypatch.setattr("perf.simulation.measure.REFERENCE_DESIGNS", (Design(1, 10**6),))
    with pytest.raises(KvforgeError, match="no reference step fits"):
        slowness(meter, costs)


def test_arrival_rates_are_parts_of_what_the_first_engine_serves() -> None:
    full = CostModel(4, 4, 32, 1024, {**PRICES, "steps": 0.0, "upper_calls": 0.0, "survivors": 0.0, "tokens": 1e-3})
    fast = CostModel(4, 2, 32, 1024, {**full.prices, "tokens": 1e-4})
    best = 1 / (1e-3 * (ARRIVING.input_tokens + ARRIVING.output_tokens - 1))  # the last token is not fed back
    rates = [traffic.rate for traffic in workloads("rates", {"full": full, "fast": fast}).values()]
    assert rates == pytest.approx([load * best for load in LOADS], abs=DECIMALS)
    assert workloads("lengths", {"full": full}) is LENGTHS


@pytest.mark.parametrize("kind", CURVES)
def test_a_curve_of_two_engines_is_one_figure(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs, result = tmp_path / "costs.json", tmp_path / kind
    engine = small_engine()
    save_costs({name: costs_of(engine) for name in ("no cut", "cut 8")}, costs)
    monkeypatch.setattr(simulate, "load_engine", lambda directory, args: engine)
    monkeypatch.setattr("perf.simulation.validation.slowness", lambda meter, costs: 1.0)
    small = {"a": Traffic(1, 8, 2, rate=50.0), "b": Traffic(2, 16, 2, rate=90.0)}
    monkeypatch.setattr(simulate, "workloads", lambda kind, costs: small)
    for name in ("no cut", "cut 8"):
        command = ["simulate", "--validate", f"{name}=unread", "--workloads", kind, "--costs", str(costs)]
        monkeypatch.setattr("sys.argv", [*command, "--output", str(result)])
        assert simulate.main() == 0
    rows = json.loads(result.with_suffix(".json").read_text())["rows"]
    assert [(row["variant"], row["workload"]) for row in rows] == [
        ("no cut", "a"), ("no cut", "b"), ("cut 8", "a"), ("cut 8", "b"),
    ]  # fmt: skip
    drawing = result.with_suffix(".svg").read_text()
    assert "no cut, simulated" in drawing and "cut 8, measured" in drawing
    assert capsys.readouterr().out.splitlines()[-1].startswith("median error: total ")
