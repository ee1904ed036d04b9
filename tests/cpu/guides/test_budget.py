"""The processor time of one request's guides, on a clock that the test moves."""

import pytest

from kvforge.errors import KvforgeError
from kvforge.runtime import guide_budget
from kvforge.runtime.guide_budget import CREDIT_S, EARNED_S, GuideBudget


class Clock:
    now = 0.0

    def thread_time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(guide_budget, "time", clock)
    return clock


def spend(budget: GuideBudget, clock: Clock, seconds: float) -> None:
    with budget.charged():
        clock.now += seconds


def test_what_is_cheap_goes_on_for_ever(clock: Clock) -> None:
    budget = GuideBudget()
    for _ in range(5000):
        budget.earn()
        spend(budget, clock, EARNED_S * 0.99)
    assert budget.allows(CREDIT_S / 2)


def test_credit_does_not_gather(clock: Clock) -> None:
    budget = GuideBudget()
    for _ in range(5000):
        budget.earn()
    assert budget.allows(CREDIT_S) and not budget.allows(CREDIT_S * 1.01)


def test_spent_is_spent_and_said_once(clock: Clock) -> None:
    said = []
    budget = GuideBudget(lambda: said.append(1))
    with pytest.raises(KvforgeError, match="too much processor time"):
        spend(budget, clock, CREDIT_S * 1.01)
    for _ in range(3000):
        budget.earn()
    with pytest.raises(KvforgeError, match="too much processor time"):
        spend(budget, clock, 0.0)
    assert said == [1] and not budget.allows(0.0)
