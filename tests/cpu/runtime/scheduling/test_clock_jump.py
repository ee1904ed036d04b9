"""The wall clock may jump: it is only reported. Deadlines, order and tokens follow the monotonic clock."""

import time

import pytest

from kvforge.runtime import LLMEngine, SamplingParams
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
DAY_S = 86400


class Clocks:
    """A monotonic clock that only ``pass_time`` moves, and a wall clock that may also jump."""

    def __init__(self, monkeypatch):
        self.now, self.offset = 1000.0, 1.7e9
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "monotonic_ns", lambda: round(self.now * 1e9))
        monkeypatch.setattr(time, "time", lambda: self.now + self.offset)
        monkeypatch.setattr(time, "time_ns", lambda: round((self.now + self.offset) * 1e9))

    def pass_time(self, seconds):
        self.now += seconds


def serve(clocks, jump_s):
    """Outputs, ends and statistics of a few requests, the wall clock jumping by ``jump_s`` in the third step."""
    engine = LLMEngine(session=FakeSession(), num_pages=40, max_num_seqs=2, max_num_tokens=16)
    for index, deadline_s in enumerate((None, 5.0, 2.5, 60.0)):
        params = SamplingParams(max_tokens=8, seed=index, ignore_eos=True, deadline_s=deadline_s)
        engine.add_request(f"r{index}", [5 + index] * 9, params)
    seen, step, last = [], 0, {}
    while engine.has_unfinished():
        step += 1
        clocks.offset += jump_s if step == 3 else 0
        for output in engine.step():
            seen.append((step, output.request_id, output.new_token_ids, output.finish_reason, output.stop_reason))
            last[output.request_id] = output.metrics
        clocks.pass_time(1.0)
    engine.check_invariants()
    times = {name: m.last_token_monotonic_ns - m.first_token_monotonic_ns for name, m in last.items()}
    return seen, engine.stats(), times


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_jump_of_a_day_changes_nothing_but_what_is_reported(jump_s, monkeypatch):
    clocks = Clocks(monkeypatch)
    expected = serve(clocks, 0)
    ends = {(name, reason, detail) for _, name, _, reason, detail in expected[0] if reason}
    assert ends == {
        ("r0", "length", None),
        ("r1", "abort", "deadline"),
        ("r2", "abort", "deadline"),
        ("r3", "length", None),
    }, "r1 was running, r2 waiting"
    assert serve(clocks, jump_s) == expected
