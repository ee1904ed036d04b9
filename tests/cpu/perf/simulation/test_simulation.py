"""The scheduler under simulated traffic: nothing is lost, queueing theory holds, a seed decides everything."""

import dataclasses
import math

import numpy as np
import pytest

from kvforge.common.errors import KvforgeError
from perf.simulation.arrivals import Traffic, arrival_times
from perf.simulation.cost_model import CostModel
from perf.simulation.simulator import Limits, Outcome, simulate
from perf.simulation.summary import summarise
from perf.simulation.work import WORK_NAMES

FREE = dict.fromkeys(WORK_NAMES, 0.0)
TYPICAL = {
    "steps": 0.01,
    "upper_calls": 0.005,
    "tokens": 1e-3,
    "survivors": 1e-3,
    "query_keys": 1e-9,
    "keys_read": 1e-8,
}
PAGE_BYTES = 1024


def costs(prices: dict[str, float], cut: int = 4) -> CostModel:
    return CostModel(num_layers=8, cut=cut, page_size=8, page_bytes=PAGE_BYTES, prices=prices)


def limits(max_num_tokens: int = 64, max_num_seqs: int = 8, num_pages: int = 200) -> Limits:
    return Limits(max_num_tokens, max_num_seqs, num_pages * PAGE_BYTES)


def check_times(outcome: Outcome) -> None:
    """Every request has all its tokens, and things happened in order."""
    traffic = outcome.traffic
    assert len(outcome.token_gaps) == traffic.num_requests * (traffic.output_tokens - 1)
    assert (outcome.arrival <= outcome.first_scheduled).all()
    assert (outcome.first_scheduled < outcome.first_token).all()
    assert (outcome.first_token <= outcome.last_token).all()
    lasting = (outcome.last_token - outcome.first_token).sum()
    assert outcome.token_gaps.sum() == pytest.approx(lasting)


@pytest.mark.parametrize("rate", [0.0, 2.0, 50.0])
@pytest.mark.parametrize("burstiness", [0.1, 1.0])
@pytest.mark.parametrize("max_num_tokens", [4, 16, 256])
def test_every_request_finishes_and_every_page_returns(rate: float, burstiness: float, max_num_tokens: int) -> None:
    traffic = Traffic(40, input_tokens=33, output_tokens=9, rate=rate, burstiness=burstiness)
    outcome = simulate(costs(TYPICAL), traffic, limits(max_num_tokens), check=True)  # raises if a page is lost
    check_times(outcome)
    assert outcome.num_preemptions == 0
    assert outcome.running.max() <= 8


@pytest.mark.parametrize(("input_tokens", "output_tokens"), [(1, 2), (1, 1), (7, 1)])
def test_the_shortest_requests_have_all_their_times(input_tokens: int, output_tokens: int) -> None:
    """The prompt of one token is planned as a decode is."""
    outcome = simulate(costs(TYPICAL), Traffic(20, input_tokens, output_tokens), limits(), check=True)
    check_times(outcome)
    assert np.isfinite(outcome.first_scheduled).all()


def test_a_small_pool_preempts_and_loses_nothing() -> None:
    traffic = Traffic(40, input_tokens=16, output_tokens=64)
    outcome = simulate(costs(TYPICAL), traffic, limits(num_pages=22), check=True)
    check_times(outcome)
    assert outcome.num_preemptions > 0 and outcome.peak_pages > 0.9
    roomy = simulate(costs(TYPICAL), traffic, limits())
    assert roomy.num_preemptions == 0 and roomy.total < outcome.total


FIVE_SIGMAS_OF_WAITS = 0.08
"""Waits of neighbours depend on one another over a busy period of about 1 / (1 - load)^2 = 6 services: 20,000 are worth
3,000 independent ones, whose deviation is about the mean: 1.8% of it, and 8% is four of these and the start's bias."""


def test_constant_service_on_one_slot_waits_as_m_d_1() -> None:
    """Mean wait of M/D/1: rho D / (2 (1 - rho)) (Pollaczek-Khinchine)."""
    service, load = 1.0, 0.6
    traffic = Traffic(20_000, input_tokens=4, output_tokens=1, rate=load / service)
    outcome = simulate(costs({**FREE, "steps": service}), traffic, limits(max_num_seqs=1))
    wait = outcome.first_scheduled - outcome.arrival
    assert wait.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=FIVE_SIGMAS_OF_WAITS)
    assert outcome.last_token - outcome.first_scheduled == pytest.approx(service)


def test_bursts_wait_longer_than_poisson_arrivals() -> None:
    traffic = Traffic(4000, input_tokens=4, output_tokens=1, rate=0.6)
    waits = [
        (outcome.first_scheduled - outcome.arrival).mean()
        for burstiness in (4.0, 1.0, 0.25)
        for outcome in [
            simulate(costs({**FREE, "steps": 1.0}), dataclasses.replace(traffic, burstiness=burstiness), limits(64, 1))
        ]
    ]
    assert waits[0] < 0.8 * waits[1] < 0.8 * 0.8 * waits[2]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    # Five deviations of a mean and of a variance of gamma variates, whose kurtosis is 3 + 6 / shape; the squared mean
    # adds 4 / shape.
    sigmas = 5 / math.sqrt(40_000)
    pauses = np.diff(arrival_times(Traffic(40_000, 1, 1, rate=5.0, burstiness=burstiness), seed=3))
    assert pauses.mean() == pytest.approx(0.2, rel=sigmas * math.sqrt(1 / burstiness))
    assert pauses.var() / pauses.mean() ** 2 == pytest.approx(
        1 / burstiness, rel=sigmas * math.sqrt(2 + 10 / burstiness)
    )


def test_a_seed_decides_everything() -> None:
    traffic = Traffic(60, 33, 9, rate=5.0, burstiness=0.5)
    first, again, other = (summarise(simulate(costs(TYPICAL), traffic, limits(), seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_one_request_costs_what_the_prices_say() -> None:
    """50 tokens in chunks of 20, 20 and 10, the last of which survives, then two decode steps."""
    prices = {"steps": 1.0, "upper_calls": 10.0, "tokens": 1e2, "survivors": 1e4, "query_keys": 0.0, "keys_read": 0.0}
    outcome = simulate(costs(prices), Traffic(1, 50, 3), limits(max_num_tokens=20))
    assert outcome.first_token.item() == 3 * 1 + 10 + 50 * 1e2 + 1e4
    assert outcome.total == outcome.first_token.item() + 2 * (1 + 10 + 1e2 + 1e4)
    pairs = simulate(costs({**FREE, "query_keys": 1.0}), Traffic(1, 50, 3), limits(max_num_tokens=20))
    assert pairs.total == 4 * (50 * 51 // 2) + 4 * 50 + 8 * (51 + 52)
    keys = simulate(costs({**FREE, "keys_read": 1.0}), Traffic(1, 50, 3), limits(max_num_tokens=20))
    assert keys.total == 4 * (20 + 40 + 50) + 4 * 50 + 8 * (51 + 52)


def test_a_cut_saves_what_a_prompt_token_does_not_run() -> None:
    prices = {**FREE, "query_keys": 1e-6}
    cut, full = (simulate(costs(prices, cut), Traffic(4, 200, 2), limits()).total for cut in (4, 8))
    assert 0.45 * full < cut < 0.55 * full


def test_impossible_traffic_is_refused() -> None:
    with pytest.raises(KvforgeError, match="at least 1"):
        Traffic(0, 1, 1)
    with pytest.raises(KvforgeError, match="burstiness"):
        Traffic(1, 1, 1, burstiness=0.0)
    with pytest.raises(KvforgeError, match="does not hold one sequence of 110 tokens"):
        simulate(costs(TYPICAL), Traffic(1, 100, 10), limits(num_pages=4))
