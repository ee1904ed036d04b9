"""The processor time of guides, on a clock that the test moves."""

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.runtime.guides import budget as guide_budget
from kvforge.runtime.guides.budget import COSTLY_S, CREDIT_S, EARNED_S, STEP_S, GuideBudget, StepTime


class Clock:
    now = 0.0
    stood_still = 0.0

    def thread_time(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now + self.stood_still


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(guide_budget, "time", clock)
    return clock


def spend(budget: GuideBudget, clock: Clock, seconds: float) -> None:
    budget.begin()
    clock.now += seconds
    budget.end()


def test_what_is_cheap_goes_on_for_ever(clock: Clock) -> None:
    step = StepTime()
    budget = GuideBudget(1, step)
    for _ in range(5000):
        step.begin()
        spend(budget, clock, EARNED_S * 0.99)
    assert budget.allows(CREDIT_S / 2)


def test_a_step_is_paid_once_however_many_sequences_there_are(clock: Clock) -> None:
    step = StepTime()
    budget = GuideBudget(1, step)
    with pytest.raises(KvforgeError, match="too much processor time"):
        for _ in range(5000):
            step.begin()
            for _ in range(8):
                spend(budget, clock, EARNED_S / 4)


def test_credit_does_not_gather(clock: Clock) -> None:
    step = StepTime()
    budget = GuideBudget(1, step)
    for _ in range(5000):
        step.begin()
        spend(budget, clock, 0.0)
    assert budget.allows(CREDIT_S) and not budget.allows(CREDIT_S * 1.01)


def test_spent_is_spent(clock: Clock) -> None:
    budget = GuideBudget(1, StepTime())
    for seconds in (CREDIT_S * 1.01, 0.0):
        with pytest.raises(KvforgeError, match="too much processor time"):
            spend(budget, clock, seconds)


def test_a_machine_that_stands_still_costs_nothing(clock: Clock) -> None:
    step = StepTime()
    step.begin()
    clock.now += 3.0  # the model
    step.mark()
    budget = GuideBudget(1, step)
    budget.begin()
    clock.now += 0.01
    clock.stood_still += 3600.0
    budget.end()
    assert budget.last_s == pytest.approx(0.01)
    spend(budget, clock, 0.0001)
    assert budget.allows(CREDIT_S - 0.011) and not budget.allows(CREDIT_S - 0.01)


def test_requests_with_one_costly_guide_share_a_step(clock: Clock) -> None:
    """However many come in step with each other, they take the step's time and one mask more; others go on."""
    step = StepTime()
    step.begin()
    mask_s, ended, before = CREDIT_S / 4, 0, clock.now
    for _ in range(64):
        try:
            spend(GuideBudget(1, step), clock, mask_s)
        except KvforgeError:
            ended += 1
    assert clock.now - before <= STEP_S + mask_s and ended >= 58
    spend(GuideBudget(2, step), clock, COSTLY_S)
    step.begin()
    spend(GuideBudget(1, step), clock, mask_s)
