"""Suffix decoding finds what counting all kept tokens finds, within its scope and its memory."""

import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from kvforge.runtime import SamplingParams
from kvforge.runtime.requests.sequence import RequestMetrics, Sequence, Status
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.suffix import CATCH_UP, SuffixDrafter
from kvforge.runtime.speculation.suffix_counts import DEPTHS, MIN_CHANCE, UNSEEN, SuffixCounts
from tests.support.schedules.fixed_drafting import speculative_engine
from tests.support.sessions.fake import FakeSession


def searched(kept, scope, text, count):
    """The draft by definition; ``kept`` are (scope, tokens before, token), the newest last."""
    drafted, chances, probability = [], [], 1.0
    while len(drafted) < count:
        for depth in DEPTHS:
            run = (*text, *drafted)[-depth:]
            behind = [t for s, before, t in kept if s == scope and len(run) == depth and before[-depth:] == run]
            if behind:
                break
        else:
            break
        times = Counter(behind)
        token = max(times, key=lambda t: (times[t], len(behind) - behind[::-1].index(t)))
        likely = times[token] / (len(behind) + UNSEEN / depth)
        probability *= likely
        if probability < MIN_CHANCE:
            break
        drafted.append(token)
        chances.append(likely)
    return drafted, chances


def test_it_finds_what_a_search_of_all_kept_tokens_finds(seeds):
    num_found = num_ties = 0
    for seed in seeds(40, 200):
        rng = random.Random(seed)
        vocab, max_tokens = rng.choice([2, 5, 300]), rng.choice([1, 7, 60, 1000])
        counts, kept = SuffixCounts(max_tokens), []
        texts = {}
        for name in range(5):
            tokens = [rng.randrange(vocab) for _ in range(120)]
            tokens[70:90] = tokens[20:40]
            texts[name] = np.array(tokens, dtype=np.int32)
        places = {name: rng.choice([0, 1, 3]) for name in texts}
        for _ in range(60):
            name = rng.choice([name for name, place in places.items() if place < 120])
            start, end = places[name], min(places[name] + rng.choice([0, 1, 1, 4, 30]), 120)
            places[name], scope = end, "ab"[name % 2]
            counts.add(scope, texts[name], start, end)
            text = tuple(texts[name].tolist())
            kept = [*kept, *((scope, text[:place], text[place]) for place in range(start, end))][-max_tokens:]
            assert len(counts) == len(kept)
            asked, length = rng.choice([texts[name], *texts.values()]), rng.randrange(1, 120)
            for scope in "abc":
                drafted, chances = counts.draft(scope, asked, length, 6)
                assert (drafted, chances) == searched(kept, scope, asked[:length].tolist(), 6)
                num_found += len(drafted) > 0
                num_ties += scope == "c" and len(drafted) > 0
            if all(place == 120 for place in places.values()):
                break
    assert num_found > 200 and not num_ties


def test_memory_is_bounded_and_what_left_is_gone():
    rng = np.random.default_rng(0)
    counts, text = SuffixCounts(2000), rng.integers(1 << 30, size=12000).astype(np.int32)
    counts.add("a", text, 0, 2000)
    tracemalloc.start()
    for start in range(2000, 12000, 500):
        counts.add("a", text, start, start + 500)
    later = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(counts) == 2000 and later <= 500 * 2000
    assert counts.draft("a", text, 11000, 4)[0] == text[11000:11004].tolist()
    assert counts.draft("a", text, 9000, 4)[0] == []
    for start in range(0, 2000, 500):
        counts.add("b", text, start, start + 500)
    assert list(counts._tables) == ["b"]


def test_tokens_that_too_few_came_before_leave_like_all_others():
    counts, text = SuffixCounts(3), np.arange(9, dtype=np.int32)
    for _ in range(2):
        counts.add("a", text, 0, 2)
    counts.add("b", text, 2, 9)
    assert len(counts) == 3 and list(counts._tables) == ["b"]
    assert counts.draft("b", text, 8, 1)[0] == [8]


def sequence_of(prompt, answer=(), **params):
    tokens, metrics = np.asarray(prompt, dtype=np.int32), RequestMetrics(0, 0)
    sequence = Sequence("a", 0, (0, 0, 0), tokens, SamplingParams(**params), 512, metrics)
    for token in answer:
        sequence.append(token)
    return sequence


@pytest.mark.parametrize(
    ("sharing", "scope", "other", "is_shared"),
    [
        ("all", "", "", True),
        ("all", "x", "y", True),
        ("scope", "x", "x", True),
        ("scope", "x", "y", False),
        ("scope", "x", "", False),
        ("scope", "", "", False),
        ("off", "x", "x", False),
    ],
)
@pytest.mark.parametrize("is_finished", [True, False])
def test_only_requests_that_share_a_scope_see_one_another(sharing, scope, other, is_shared, is_finished):
    drafter = SuffixDrafter(SpeculativeConfig("suffix", suffix_sharing=sharing))
    first = sequence_of([0, 0, 1, 2, 3, 4], [5, 6, 7, 8], draft_scope=scope)
    drafter.draft([first], [2])
    if is_finished:
        first.status = Status.FINISHED
        for _ in range(2):
            drafter.forget(first)
    second = sequence_of([0, 0, 1, 2, 3, 4], draft_scope=other)
    assert drafter.draft([second], [2])[0].token_ids == ((5, 6) if is_shared else ())
    # What is counted are outputs: a prompt is never drafted for another request.
    third = sequence_of([1, 2], draft_scope=other)
    assert drafter.draft([third], [3])[0].token_ids == ()
    assert drafter.stats() == {"suffix_num_tokens": 4 if sharing == "all" or (scope and sharing == "scope") else 0}


def test_an_output_is_counted_once_though_it_is_preempted_or_never_drafted_for():
    drafter = SuffixDrafter(SpeculativeConfig("suffix", suffix_sharing="all"))
    first, second = sequence_of([1, 2, 3], [4, 5]), sequence_of([1, 2, 3], [4, 6])
    drafter.draft([first], [2])
    drafter.forget(first)  # preempted
    first.append(7)
    for sequence in (first, second):
        for _ in range(2):
            sequence.status = Status.FINISHED
            drafter.forget(sequence)
    assert drafter.stats() == {"suffix_num_tokens": 2}
    for _ in range(2):
        drafter.draft([sequence_of([9])], [1])
        assert drafter.stats() == {"suffix_num_tokens": 5}


def test_outputs_that_ended_are_counted_with_drafts_a_few_tokens_each_the_newest_output_first():
    """So where nothing is drafted, nothing is counted; and no more wait than are kept."""
    most, length = 6 * CATCH_UP, 2 * CATCH_UP + 3
    drafter = SuffixDrafter(SpeculativeConfig("suffix", suffix_sharing="all", suffix_max_tokens=most))
    answers = [list(range(first, first + length)) for first in (100, 200, 300, 400)]
    for answer in answers:
        ended = sequence_of([1, 2], answer)
        ended.status = Status.FINISHED
        drafter.forget(ended)
    assert drafter.stats() == {"suffix_num_tokens": 0}
    new, left = sequence_of([9]), most // length * length
    for counted in range(CATCH_UP, left + CATCH_UP, CATCH_UP):
        drafter.draft([new], [1])
        assert drafter.stats() == {"suffix_num_tokens": min(counted, left)}
    known = [drafter.draft([sequence_of([9, *answer[:4]])], [1])[0].token_ids for answer in answers]
    assert known == [(), (), (304,), (404,)]
    # Two sequences count twice as many, and a text that was interrupted goes on where it was.
    drafter = SuffixDrafter(SpeculativeConfig("suffix", suffix_sharing="all"))
    for answer in answers[:2]:
        ended = sequence_of([1, 2], answer)
        ended.status = Status.FINISHED
        drafter.forget(ended)
        drafter.draft([new, new], [1, 1])
    assert drafter.stats() == {"suffix_num_tokens": 4 * CATCH_UP}
    drafts = drafter.draft([sequence_of([9, *answers[1][-4:-2]]), new], [2, 1])
    assert drafts[0].token_ids == tuple(answers[1][-2:])


def test_what_waits_to_be_counted_is_all_that_is_held():
    """Of texts that were all but counted when newer ones ended, too; of one longer than what is kept, its end."""
    length, most = 20 * CATCH_UP + 1, 20 * CATCH_UP + 6
    drafter = SuffixDrafter(SpeculativeConfig("suffix", suffix_sharing="all", suffix_max_tokens=most))
    for number in range(1, 6):
        ended = sequence_of([1, 2], range(length))
        ended.status = Status.FINISHED
        drafter.forget(ended)
        drafter.draft([sequence_of([9])] * 20, [1] * 20)
        assert sum(len(tokens) for _, tokens, _ in drafter._ended) == number * (1 + DEPTHS[0])
    longer = sequence_of([1, 2], range(1_000, 1_000 + 2 * length))
    longer.status = Status.FINISHED
    drafter.forget(longer)
    drafter.draft([sequence_of([9])] * 21, [1] * 21)
    assert drafter.stats() == {"suffix_num_tokens": most}
    for start, is_known in ((1_000, False), (1_000 + length, True)):
        draft = drafter.draft([sequence_of([9, start, start + 1])], [1])[0]
        assert draft.token_ids == ((start + 2,) if is_known else ())


def test_the_draft_with_more_expected_tokens_counts():
    drafter = SuffixDrafter(SpeculativeConfig("suffix", suffix_sharing="all"))
    for _ in range(4):
        other = sequence_of([1, 2, 3, 4], [5, 6, 7])
        other.status = Status.FINISHED
        drafter.forget(other)
    # Two tokens stood in the prompt before; four, and more often, in outputs.
    assert drafter.draft([sequence_of([3, 4, 8, 9, 1, 2, 3, 4])], [3])[0].token_ids == (5, 6, 7)
    # Eight tokens that stood once are better than two.
    drafter = SuffixDrafter(SpeculativeConfig("suffix", suffix_sharing="all"))
    drafter.draft([sequence_of([1, 2, 3, 4], [5, 6, 7])], [1])
    own = [3, 4, 5, 6, 9, 9, 3, 4, 8, 8]
    assert drafter.draft([sequence_of([*own, *own[:8]])], [2])[0].token_ids == (8, 8)


def test_the_second_of_equal_requests_takes_fewer_steps():
    def num_steps(engine, name):
        before = engine.num_iterations
        engine.add_request(name, [5, 6, 7], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        tokens = []
        while engine.has_unfinished():
            tokens += [token for output in engine.step() for token in output.new_token_ids]
        return engine.num_iterations - before, tokens

    drafter = SuffixDrafter(SpeculativeConfig("suffix", suffix_sharing="all"))
    engine = speculative_engine(FakeSession(max_draft_len=4, memory=6), drafter, 4)
    (steps, tokens), (fewer, same) = num_steps(engine, "a"), num_steps(engine, "b")
    assert same == tokens and fewer < steps / 1.5
    assert 80 - CATCH_UP <= engine.stats()["suffix_num_tokens"] <= 80
