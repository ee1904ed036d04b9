"""Drafting that has nothing to draft is tried less and less, and at once when the running sequences change."""

from kvforge.runtime import SamplingParams
from kvforge.runtime.speculation.draft_length import DraftLength
from kvforge.runtime.speculation.drafter import Draft
from kvforge.runtime.speculation.drafting import IDLE, MAX_CLOSED, MAX_REST
from tests.support.schedules.fixed_drafting import speculative_engine
from tests.support.sessions.fake import FakeSession


class ParsedRequest:
    """Drafts one token for sequences longer than ``since``; notes the steps in which it was asked."""

    def __init__(self, since):
        self.since, self.steps, self.engine = since, [], None

    def draft(self, sequences, counts):
        self.steps.append(self.engine.num_iterations)
        return [Draft((5,) if sequence.length > self.since else ()) for sequence in sequences]

    def forget(self, sequence):
        pass


def start(since):
    drafter = ParsedRequest(since)
    engine = speculative_engine(FakeSession(max_draft_len=3), drafter, 1, enable_prefix_cache=False)
    drafter.engine = engine
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
    return engine, drafter


def test_nothing_to_draft_is_looked_for_ever_more_seldom_and_at_once_beside_a_new_sequence():
    engine, drafter = start(since=1000)
    while engine.num_iterations < 95:
        engine.step()
    gaps = [after - before for before, after in zip(drafter.steps, drafter.steps[1:], strict=False)]
    assert gaps[: IDLE - 1] == [1] * (IDLE - 1) and gaps == sorted(gaps)
    assert 5 < gaps[-1] <= MAX_REST + 1
    while engine.drafting._rest < 2:
        engine.step()
    asked = len(drafter.steps)
    engine.add_request("b", [8, 9], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    engine.step()
    assert len(drafter.steps) == asked + 1


def test_what_drafts_is_asked_in_every_step_again():
    engine, drafter = start(since=60)
    while engine.has_unfinished():
        engine.step()
    first = next(index for index, step in enumerate(drafter.steps) if step >= 60 + MAX_REST)
    later = drafter.steps[first:]
    assert later == list(range(later[0], later[0] + len(later))) and len(later) > 10


def test_while_drafting_does_not_pay_steps_between_are_not_observed_but_count():
    """All but one of 32, until the balance is open again."""
    engine = speculative_engine(FakeSession(max_draft_len=3), ParsedRequest(since=1000), 1, enable_prefix_cache=False)
    drafting = engine.drafting
    drafting._lengths = lengths = DraftLength(3)
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(4):
        engine.step()
    ((cost, balance),) = lengths._costs.values()
    assert cost.is_known
    drafting._rest = 0
    balance.add_drafting(-10.0)
    closed, counted, observe = balance.num_closed, [], lengths.observe
    lengths.observe = lambda *given: counted.append(given[4]) or observe(*given)
    for _ in range(3 + 2 * MAX_CLOSED):
        engine.step()
    assert counted[0] == 0 and set(counted[1:]) == {MAX_CLOSED} and len(counted) >= 3
    # The first of them follows a step that was tried, so that its time says nothing.
    assert balance.num_closed + sum(counted) + len(counted) - 1 == closed
