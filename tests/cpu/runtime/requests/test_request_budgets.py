"""Lists of a request are bounded by their length before anything looks at their entries."""

import dataclasses
import math

import numpy as np
import pytest

from kvforge.common.errors import RequestError
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.requests.checks import (
    MAX_BIAS_TOKENS,
    MAX_DRAFT_TOKENS,
    MAX_ID_WORDS,
    MAX_RANGES,
    MAX_SYMBOLS,
    MAX_WORDS,
)
from tests.support.sessions.fake import FakeSession


class Unread(list):
    """A list whose entries nobody may look at."""

    def __iter__(self):
        raise AssertionError("the entries were looked at")


class UnreadMapping(dict):
    keys = values = items = __iter__ = Unread.__iter__


LISTS = [
    ("stop", "x", MAX_WORDS),
    ("stop_token_ids", 3, MAX_ID_WORDS),
    ("stop_words_ids", [3], MAX_ID_WORDS),
    ("bad_words", "x", MAX_WORDS),
    ("bad_words_ids", [3], MAX_ID_WORDS),
    ("draft_token_ids", 3, MAX_DRAFT_TOKENS),
    ("retention", [0, 4, 50], MAX_RANGES),
]


@pytest.mark.parametrize("name, entry, most", LISTS)
def test_too_many_entries_are_refused_unread(name, entry, most):
    assert len(getattr(SamplingParams(**{name: [entry] * most}), name)) in (1, most)
    with pytest.raises(RequestError, match=f"^{name} has {most + 1} entries; give at most {most}.$"):
        SamplingParams(**{name: Unread([entry] * (most + 1))})
    with pytest.raises(RequestError, match=f"^{name} has 1000000000000 entries"):
        SamplingParams(**{name: np.broadcast_to(np.int64(3), (10**12,))})


def test_too_large_a_bias_is_refused_unread():
    with pytest.raises(RequestError, match=f"^logit_bias has {MAX_BIAS_TOKENS + 1} entries; give at most"):
        SamplingParams(logit_bias=UnreadMapping(dict.fromkeys(range(MAX_BIAS_TOKENS + 1), 1.0)))


@pytest.mark.parametrize(
    "name, words, unit",
    [
        ("stop", ["x" * (MAX_SYMBOLS + 1)], "characters"),
        ("bad_words", ["x" * 5] * (MAX_SYMBOLS // 5 + 1), "characters"),
        ("stop_words_ids", [[3] * (MAX_SYMBOLS + 1)], "token ids"),
        ("bad_words_ids", [[3] * 3] * (MAX_SYMBOLS // 3 + 1), "token ids"),
    ],
)
def test_words_that_are_too_long_together(name, words, unit):
    size = sum(map(len, words))
    with pytest.raises(RequestError, match=f"^{name} has {size} {unit} together; give at most {MAX_SYMBOLS}.$"):
        SamplingParams(**{name: words})


def test_equal_words_are_kept_once():
    params = SamplingParams(
        stop=["b", "a", "b"], bad_words=["x", "x"], stop_words_ids=[[1, 2], [3], [1, 2]], bad_words_ids=[[4], [4]]
    )
    assert params.stop == ("b", "a") and params.bad_words == ("x",)
    assert params.stop_words_ids == ((1, 2), (3,)) and params.bad_words_ids == ((4,),)
    with pytest.raises(RequestError, match=r"stop_words_ids holds 1\.0"):
        SamplingParams(stop_words_ids=[[1], [1.0]])


@pytest.mark.parametrize(
    "changes",
    [
        {"n": [1] * 10**6},
        {"temperature": "1" * 10**6},
        {"stop": ["a", ["x" * 10**4]]},
        {"stop_token_ids": ["x" * 10**6]},
        {"retention": [list(range(10**6))]},
        {"retention": [["x" * 10**6, 1, 2]]},
        {"logit_bias": {"x" * 10**6: 1.0}},
        {"logit_bias": {1: "x" * 10**6}},
        {"return_logits": "x" * 10**6},
    ],
)
def test_refusals_are_short_whatever_is_refused(changes):
    with pytest.raises(RequestError) as error:
        SamplingParams(**changes)
    assert len(str(error.value)) < 500 and str(error.value).endswith(".")


def test_a_bias_of_every_token_is_read_the_same_in_every_form():
    numbers = np.random.default_rng(0).choice([-math.inf, -1e31, -3.0, 0.5, 4.0], 1000)
    expected = {token: -math.inf if number < -1e30 else float(number) for token, number in enumerate(numbers)}
    as_text = {str(token): float(number) for token, number in enumerate(numbers)}
    as_numpy = {np.int64(token): np.float32(number) for token, number in enumerate(numbers)}
    mixed = {token if token % 2 else str(token): float(number) for token, number in enumerate(numbers)}
    for form in (as_text, as_numpy, mixed):
        assert SamplingParams(logit_bias=form).logit_bias == expected
    for key in ("-1", "1.0", "", "²", "9" * 20):
        with pytest.raises(RequestError, match="logit_bias holds the key"):
            SamplingParams(logit_bias={**as_text, key: 1.0})
    with pytest.raises(RequestError, match="logit_bias holds token id 7 twice"):
        SamplingParams(logit_bias={**as_text, "007": 1.0})
    for number in (math.nan, 1e31, math.inf):
        with pytest.raises(RequestError, match="logit_bias of token 999 is"):
            SamplingParams(logit_bias={**as_text, "999": number})


@pytest.mark.parametrize("name", ["stop_words_ids", "bad_words_ids"])
def test_words_longer_than_a_sequence_are_refused(name):
    engine = LLMEngine(session=FakeSession(), num_pages=40)
    with pytest.raises(RequestError, match=f"^{name} holds a word of 129 tokens, but a sequence has at most 128;"):
        engine.add_request("r", [5], SamplingParams(**{name: [[3] * 129]}))
    assert not engine.has_unfinished()
    engine.add_request("r", [5], SamplingParams(**{name: [[3] * 128]}))


def test_a_prompt_that_is_too_long_is_refused_unread():
    engine = LLMEngine(session=FakeSession(), num_pages=40)
    with pytest.raises(RequestError, match="the prompt has 1000 tokens, but the engine takes at most 127"):
        engine.add_request("r", Unread([5] * 1000), SamplingParams())


def test_sequences_of_a_request_share_what_is_the_same():
    engine = LLMEngine(session=FakeSession(), num_pages=40)
    params = SamplingParams(
        n=100,
        stop_words_ids=[[3, 4]],
        bad_words_ids=[[5, 6]],
        logit_bias={token: 0.5 for token in range(64)},
        stop_token_ids=list(range(10, 20)),
        repetition_penalty=1.2,
    )
    engine.add_request("r", [5], params)
    states = [sequence.sampling for sequence in engine.requests["r"].sequences]
    assert len({id(state) for state in states}) == 100 and len({id(state.request) for state in states}) == 1
    assert len({id(state.counts) for state in states}) == 100, "what is generated is each one's own"
    assert len({id(sequence.stopper._automaton) for sequence in engine.requests["r"].sequences}) == 1
    same = dataclasses.replace(params)
    assert same == params and hash(same) == hash(params), "what was made of the words is no part of the parameters"
