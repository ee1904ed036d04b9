"""The engine's behaviour on a fake model: ends, sharing, priorities, deadlines, failures, metrics."""

import time

import numpy as np
import pytest
import torch

from kvforge.runtime import LLMEngine, SamplingParams
from tests.support.rounding import logprob_error
from tests.support.sessions.fake import FakeSession, context_logits

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def make_engine(session=None, **options):
    session = session or FakeSession()
    return LLMEngine(session=session, **{"num_pages": 60, **options})


def run(engine):
    """Run to the end; returns outputs by (request_id, index), checking the invariants after every step."""
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.check_invariants()
    return outputs


def tokens_of(outputs):
    return [token for output in outputs for token in output.new_token_ids]


def greedy_reference(prompt, num_tokens):
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(int(np.argmax(context_logits(context, 0, 64))))
    return context[len(prompt) :]


def test_greedy_tokens_are_the_models():
    engine = make_engine(max_num_tokens=3)
    engine.add_request("a", [5, 6, 7, 8, 9], GREEDY)
    outputs = run(engine)[("a", 0)]
    assert tokens_of(outputs) == greedy_reference([5, 6, 7, 8, 9], 8)
    assert [o.finished for o in outputs] == [False] * 7 + [True]
    assert outputs[-1].finish_reason == "length" and outputs[0].logprobs is None


def test_end_of_text_stop_token_and_length():
    expected = greedy_reference([5, 6], 40)
    eos = expected[3]
    first = expected.index(eos) + 1
    engine = make_engine(FakeSession(eos_token_ids=(eos,)))
    for name, changes in {
        "eos": {},
        "ignored": {"ignore_eos": True},
        "longer": {"min_tokens": first + 1},
        "stop token": {"ignore_eos": True, "stop_token_ids": [eos]},
        "exact": {"max_tokens": first},
        "words": {"stop_words_ids": [expected[1:3]]},
    }.items():
        engine.add_request(name, [5, 6], SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **changes}))
    all_outputs = run(engine)
    ends = {key[0]: outputs[-1] for key, outputs in all_outputs.items()}
    taken = {key[0]: tokens_of(outputs) for key, outputs in all_outputs.items()}
    assert taken["eos"] == taken["stop token"] == taken["exact"] == expected[:first]
    assert (ends["eos"].finish_reason, ends["eos"].stop_reason) == ("stop", None)
    assert (ends["stop token"].finish_reason, ends["stop token"].stop_reason) == ("stop", eos)
    assert ends["exact"].finish_reason == "stop"
    assert taken["ignored"] == expected and ends["ignored"].finish_reason == "length"
    assert len(taken["longer"]) > first and eos not in taken["longer"][: first + 1]
    assert taken["words"] == expected[:3] and ends["words"].stop_reason == tuple(expected[1:3])


def test_max_seq_len_ends_a_sequence():
    engine = make_engine(max_seq_len=10)
    engine.add_request("a", [5] * 7, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    outputs = run(engine)[("a", 0)]
    assert len(tokens_of(outputs)) == 3 and outputs[-1].finish_reason == "length"


def test_steps_without_survivors_do_not_run_upper():
    session = FakeSession()
    engine = make_engine(session, max_num_tokens=4)
    engine.add_request("a", [5] * 17, SamplingParams(temperature=0.0, max_tokens=1))
    for step in range(4):
        assert engine.step() == [] and session.num_upper_calls == 0 and session.num_lower_calls == step + 1
    assert len(engine.step()) == 1 and session.num_upper_calls == 1
    assert engine.stats()["num_upper_calls"] == 1


def test_prefill_chunks_do_not_stall_decoding():
    engine = make_engine(max_num_tokens=5)
    engine.add_request("short", [5], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    engine.step()
    engine.add_request("long", [6] * 41, GREEDY)
    for _ in range(10):
        assert [o.request_id for o in engine.step()] == ["short"], "a token each step beside the chunks"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_sequences_of_a_request_share_the_prompts_pages(prefix_cache):
    session = FakeSession()
    engine = make_engine(session, enable_prefix_cache=prefix_cache)
    params = SamplingParams(n=4, seed=3, max_tokens=6, ignore_eos=True)
    engine.add_request("a", [5] * 13, params)
    engine.step()
    engine.step()
    shared = [s.pages[:3] for s in engine.scheduler.running]
    assert len(shared) == 4 and all(pages == shared[0] for pages in shared)
    assert [engine.scheduler.pool.ref_counts[page] for page in shared[0]] == [4, 4, 4]
    outputs = run(engine)
    assert len({tuple(tokens_of(o)) for o in outputs.values()}) > 1, "seeds differ"
    assert engine.stats()["num_used_pages"] == 0 and engine.stats()["num_reused_tokens"] == 3 * 12


def test_prefix_cache_reuses_pages_but_computes_the_last_token():
    engine = make_engine()
    prompt = list(range(3, 15))
    engine.add_request("a", prompt, GREEDY)
    first = tokens_of(run(engine)[("a", 0)])
    assert engine.stats()["num_cached_pages"] == 4 and engine.stats()["num_free_pages"] == 60
    engine.add_request("b", prompt, GREEDY)
    outputs = run(engine)[("b", 0)]
    assert tokens_of(outputs) == first
    assert outputs[0].metrics.num_reused_pages == 2, "12 tokens fill 3 pages, but one token must be computed"
    engine.add_request("c", [*prompt, *first[:5]], GREEDY)
    assert run(engine)[("c", 0)][0].metrics.num_reused_pages == 4, "generated pages are reused too"


def test_cached_pages_are_given_up_oldest_first():
    engine = make_engine(num_pages=8)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    for name, token in (("a", 5), ("b", 6)):
        engine.add_request(name, [token] * 13, one)
        run(engine)
    assert engine.stats()["num_cached_pages"] == 6
    engine.add_request("c", [7] * 13, one)
    run(engine)
    engine.add_request("b again", [6] * 13, one)
    assert run(engine)[("b again", 0)][0].metrics.num_reused_pages == 3
    engine.add_request("a again", [5] * 13, one)
    reused = run(engine)[("a again", 0)][0].metrics.num_reused_pages
    assert reused < 3, "the end of the oldest prefix made room"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_keeps_tokens_and_order(prefix_cache):
    engine = make_engine(num_pages=6, enable_prefix_cache=prefix_cache)
    params = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
    for name, token in (("a", 5), ("b", 6)):
        engine.add_request(name, [token] * 3, params)
    outputs = run(engine)
    assert engine.stats()["num_preemptions"] > 0
    assert all(o[-1].metrics.num_reused_pages == 0 for o in outputs.values())
    assert outputs[("a", 0)][-1].metrics.num_preemptions == 0, "the first to arrive is never the victim"
    assert outputs[("b", 0)][-1].metrics.num_preemptions == engine.stats()["num_preemptions"]
    for name, token in (("a", 5), ("b", 6)):
        assert tokens_of(outputs[(name, 0)]) == greedy_reference([token] * 3, 18)


def test_lower_priority_number_goes_first_and_takes_a_slot():
    engine = make_engine(max_num_seqs=1)
    engine.add_request("usual", [5], GREEDY)
    engine.step()
    engine.add_request("later", [6], SamplingParams(temperature=0.0, max_tokens=2, priority=1))
    engine.add_request("urgent", [7], SamplingParams(temperature=0.0, max_tokens=2, priority=-1, ignore_eos=True))
    finished, paused = [], []
    while engine.has_unfinished():
        finished += [o.request_id for o in engine.step() if o.finished]
        paused.append(engine.stats()["num_paused"])
        engine.check_invariants()
    assert finished == ["urgent", "usual", "later"]
    assert engine.stats()["num_preemptions"] == 1
    assert paused[0] == 1 and paused[-1] == 0, "the preempted one waits, the one that never ran is not paused"


def test_deadline_aborts_waiting_and_running_requests(monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    engine = make_engine(max_num_seqs=1)
    slow = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, deadline_s=0.05, n=2)
    engine.add_request("running", [5], slow)
    engine.step()
    engine.add_request("waiting", [6], slow)
    engine.add_request("patient", [7], GREEDY)
    now += 0.06
    outputs = run(engine)
    for name in ("running", "waiting"):
        for index in range(2):
            last = outputs[(name, index)][-1]
            assert (last.finish_reason, last.stop_reason, last.new_token_ids) == ("abort", "deadline", [])
    assert outputs[("patient", 0)][-1].finish_reason == "length"


def test_deadlines_of_finished_requests_are_forgotten():
    engine = make_engine()
    for i in range(300):
        engine.add_request(f"r{i}", [5], SamplingParams(temperature=0.0, max_tokens=1, deadline_s=1000))
        run(engine)
    assert len(engine._deadlines) < 80


def test_abort_frees_pages_at_once_and_is_idempotent():
    engine = make_engine(enable_prefix_cache=False)
    engine.add_request("a", [5] * 9, SamplingParams(n=2, max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert engine.stats()["num_used_pages"] > 0
    assert engine.abort("a") and not engine.abort("a") and not engine.abort("never seen")
    assert engine.stats()["num_used_pages"] == 0 and not engine.has_unfinished() and engine.step() == []
    engine.check_invariants()


@pytest.mark.parametrize("fail_at", [1, 2, 3, 6])
def test_a_failing_step_ends_its_requests_and_loses_nothing(fail_at, caplog):
    session = FakeSession()
    session.fail_on = lambda s: s.num_lower_calls == fail_at
    engine = make_engine(session, max_num_tokens=8, max_num_seqs=2)
    prompts = {"a": [5] * 6, "b": [6] * 9, "c": [7] * 5}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    outputs = run(engine)
    ends = {key[0]: o[-1] for key, o in outputs.items()}
    failed = {name for name, end in ends.items() if end.finish_reason == "error"}
    assert failed and failed != set(prompts) and set(ends) == set(prompts)
    assert all("the fake device is on fire" in ends[name].stop_reason for name in failed)
    assert engine.stats()["num_used_pages"] == 0 and engine.stats()["num_failed_steps"] == 1
    for name in failed:
        engine.add_request(name, prompts[name], GREEDY)
    outputs |= run(engine)
    for name, prompt in prompts.items():
        assert tokens_of(outputs[(name, 0)]) == greedy_reference(prompt, 8)


class BrokenLogits(FakeSession):
    """Every context that holds token 60 gets NaN logits once it is ``length`` long."""

    length = 0

    def upper(self, step, pools):
        logits, starts = super().upper(step, pools), step.survivor_start
        for row, sequence in enumerate(torch.searchsorted(starts, torch.arange(len(logits)), right=True) - 1):
            length = int(step.kv_length[sequence])
            pages = step.page_table[sequence, : -(-length // self.manifest.page_size)].long()
            if length >= self.length and 60.0 in pools[0][0][pages].reshape(-1, 2)[:length, 0].tolist():
                logits[row] = float("nan")
        return logits


@pytest.mark.parametrize("length", [0, 15])
@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0, "seed": 2, "presence_penalty": 0.5}])
def test_logits_that_are_not_finite_end_only_their_sequence(length, changes, caplog):
    session = BrokenLogits()
    session.length = length
    engine = make_engine(session, max_num_tokens=9)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **changes})
    bad = [60] + [5] * 11
    prompts = {"a": [5] * 6, "bad": bad, "c": [7] * 11}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    outputs = run(engine)
    end = outputs[("bad", 0)][-1]
    assert (end.finish_reason, end.stop_reason) == ("error", "the model's logits are not finite")
    assert end.new_token_ids == [] and len(tokens_of(outputs[("bad", 0)])) == max(0, length - len(bad))
    assert engine.stats()["num_failed_steps"] == 0 and engine.stats()["num_used_pages"] == 0
    assert engine.stats()["num_generated_tokens"] == 16 + max(0, length - len(bad))
    for name in ("a", "c"):
        alone = make_engine()
        alone.add_request(name, prompts[name], params)
        assert tokens_of(outputs[(name, 0)]) == tokens_of(run(alone)[(name, 0)])


def test_pages_of_a_step_that_failed_a_sequence_are_not_reused(caplog):
    session = BrokenLogits()
    engine = make_engine(session)
    prompt = [60] + [5] * 12
    engine.add_request("bad", prompt, GREEDY)
    engine.add_request("good", [6] * 13, GREEDY)
    assert run(engine)[("bad", 0)][-1].finish_reason == "error"
    session.length = 1000
    reused = []
    for tokens in (prompt, [6] * 13, prompt):
        engine.add_request("again", tokens, GREEDY)
        outputs = run(engine)[("again", 0)]
        assert outputs[-1].finish_reason == "length"
        reused.append(outputs[0].metrics.num_reused_pages)
    assert reused == [0, 3, 3]


def test_bad_words_win_over_the_minimum_length():
    engine = make_engine()
    for name, changes in (("greedy", {"temperature": 0.0}), ("drawn", {"seed": 0})):
        words = [[i] for i in range(64) if i != 2]
        engine.add_request(name, [5], SamplingParams(max_tokens=6, min_tokens=4, bad_words_ids=words, **changes))
    outputs = run(engine)
    for name in ("greedy", "drawn"):
        assert tokens_of(outputs[(name, 0)]) == [2] and outputs[(name, 0)][-1].finish_reason == "stop"


def test_a_sequence_that_bad_words_leave_no_token_ends_alone(caplog):
    engine = make_engine()
    (first,) = greedy_reference([5], 1)
    stuck = SamplingParams(temperature=0.0, max_tokens=6, bad_words_ids=[[first, i] for i in range(64)])
    engine.add_request("stuck", [5], stuck)
    engine.add_request("other", [6], GREEDY)
    outputs = run(engine)
    end = outputs[("stuck", 0)][-1]
    assert tokens_of(outputs[("stuck", 0)]) == [first] and end.finish_reason == "error"
    assert "bad words" in end.stop_reason
    assert tokens_of(outputs[("other", 0)]) == greedy_reference([6], 8)


def test_metrics_and_stats():
    engine = make_engine(max_num_seqs=1)
    before = time.time_ns()
    for name in ("a", "b"):
        engine.add_request(name, [5] * 5, GREEDY)
    assert engine.stats()["num_waiting"] == 2
    engine.step()
    stats = engine.stats()
    assert (stats["num_waiting"], stats["num_running"]) == (1, 1)
    assert stats["num_used_pages"] + stats["num_free_pages"] == stats["num_pages"] == 60
    outputs = run(engine)
    assert engine.stats()["num_generated_tokens"] == 16
    for name in ("a", "b"):
        m = outputs[(name, 0)][-1].metrics
        assert before <= m.arrival_time_ns <= m.first_scheduled_time_ns <= m.first_token_time_ns
        assert m.first_token_monotonic_ns < m.last_token_monotonic_ns
        assert m.num_reused_pages + m.num_allocated_pages == 3 and m.num_new_pages == m.num_allocated_pages
    assert (
        outputs[("b", 0)][-1].metrics.first_scheduled_monotonic_ns
        >= outputs[("a", 0)][-1].metrics.last_token_monotonic_ns
    )


def test_logprobs_come_with_each_token():
    engine = make_engine()
    engine.add_request("a", [5, 6], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2))
    context = [5, 6]
    for output in run(engine)[("a", 0)]:
        logits = context_logits(context, 0, 64).astype(np.float64)
        exact = logits - np.log(np.exp(logits).sum())
        rounding = logprob_error(64, float(np.abs(logits).max()))
        (entry,) = output.logprobs
        assert [entry.token_id] == output.new_token_ids == [int(exact.argmax())]
        assert entry.logprob == pytest.approx(exact.max(), abs=rounding) and entry.rank == 1
        assert list(entry.top) == np.argsort(-exact)[:2].tolist()
        context.append(entry.token_id)
