"""Sampling parameters as JSON data: every value outside its range is refused in one sentence."""

import dataclasses
import json
import math

import numpy as np
import pytest

from kvforge.common.errors import RequestError
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.requests.guided_decoding import MAX_GUIDE_BYTES, GuidedDecoding
from tests.support.sessions.fake import FakeSession


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"logit_bias": [1.0]}, "logit_bias is of type tuple; give a mapping"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias holds the key -1"),
        ({"logit_bias": {True: 1.0}}, "logit_bias holds the key True"),
        ({"logit_bias": {1.0: 1.0}}, "logit_bias holds the key 1.0"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias holds the key 'x'"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias holds the key '-1'"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "logit_bias holds the key"),
        ({"logit_bias": {1: 1.0, "1": 2.0}}, "logit_bias holds token id 1 twice"),
        ({"logit_bias": {1: math.nan}}, "logit_bias of token 1 is nan"),
        ({"logit_bias": {1: math.inf}}, "logit_bias of token 1 is inf"),
        ({"logit_bias": {1: 1e31}}, "logit_bias of token 1 is 1e+31"),
        ({"logit_bias": {1: 10**400}}, "logit_bias of token 1 is 1000"),
        ({"logit_bias": {1: True}}, "logit_bias of token 1 is True"),
        ({"logit_bias": {1: "2"}}, "logit_bias of token 1 is '2'"),
        ({"logit_bias": {1: None}}, "logit_bias of token 1 is None"),
        ({"top_p_decay": 0.0}, "top_p_decay is 0.0; give a finite number above 0 and at most 1"),
        ({"top_p_decay": 1.5}, "top_p_decay"),
        ({"top_p_decay": math.nan}, "top_p_decay is nan"),
        ({"top_p_decay": True}, "top_p_decay is True"),
        ({"top_p_min": 0.0}, "top_p_min"),
        ({"top_p_min": -1}, "top_p_min is -1"),
        ({"top_p_min": math.inf}, "top_p_min"),
        ({"top_p_min": None}, "top_p_min is None"),
        ({"top_p_reset_id": -2}, "top_p_reset_id is -2; give a whole number of at least -1"),
        ({"top_p_reset_id": 1.0}, "top_p_reset_id"),
        ({"return_logits": 1}, "return_logits is 1; give true or false"),
        ({"draft_token_ids": [-1]}, "draft_token_ids holds -1"),
        ({"draft_token_ids": [math.nan]}, "draft_token_ids holds nan"),
        ({"draft_token_ids": 5}, "draft_token_ids is 5"),
        ({"draft_token_ids": [True]}, "draft_token_ids holds True"),
        ({"draft_scope": "x" * 129}, "give a text of at most 128 characters"),
        ({"draft_scope": 5}, "draft_scope is 5"),
        ({"retention": [3]}, "retention holds 3"),
        ({"retention": [[0, 4]]}, "retention holds (0, 4)"),
        ({"retention": [[0, 4, 0.5]]}, "retention holds (0, 4, 0.5)"),
        ({"retention": [[0, True, 50]]}, "retention holds (0, True, 50)"),
        ({"retention": [[-1, 4, 50]]}, "retention holds tokens -1 to 4"),
        ({"retention": [[4, 4, 50]]}, "retention holds tokens 4 to 4"),
        ({"retention": [[0, -2, 50]]}, "retention holds tokens 0 to -2"),
        ({"retention": [[0, -1, 101]]}, "retention holds priority 101"),
        ({"retention": [[0, -1, -1]]}, "retention holds priority -1"),
        ({"retention": "0"}, "retention is '0'; give a list"),
        ({"guided_decoding": "json"}, "give its kind and guide"),
        ({"guided_decoding": {"guide": "x"}}, "give its kind and guide"),
        ({"guided_decoding": {"kind": "regex", "guide": "x", "more": 1}}, "give its kind and guide"),
        (
            {"guided_decoding": {"kind": "xml", "guide": "x"}},
            "guided_decoding is of kind 'xml'; give one of json, json_schema",
        ),
        ({"guided_decoding": {"kind": ["regex"], "guide": "x"}}, "guided_decoding is of kind ['regex']"),
        ({"guided_decoding": {"kind": "regex"}}, "kind regex has no guide"),
        ({"guided_decoding": {"kind": "regex", "guide": ""}}, "kind regex has no guide"),
        ({"guided_decoding": {"kind": "regex", "guide": 3}}, "of type int; give text"),
        ({"guided_decoding": {"kind": "regex", "guide": "\udc80"}}, "not Unicode"),
        (
            {"guided_decoding": {"kind": "regex", "guide": "x" * (MAX_GUIDE_BYTES + 1)}},
            "a guide of 65537 bytes; give at",
        ),
        ({"guided_decoding": {"kind": "json", "guide": "{}"}}, "json takes no guide"),
        ({"guided_decoding": {"kind": "json_schema", "guide": {"a": math.nan}}}, "is not JSON data"),
        ({"guided_decoding": {"kind": "json_schema", "guide": {"a": object()}}}, "is not JSON data"),
    ],
)
def test_wrong_values_are_one_sentence(changes, says):
    with pytest.raises(RequestError) as error:
        SamplingParams(**changes)
    message = str(error.value)
    assert says in message and message.endswith(".") and "\n" not in message


def test_plain_json_data_makes_the_same_parameters():
    params = SamplingParams(
        logit_bias={3: -math.inf, np.int64(5): np.float32(0.5)},
        guided_decoding=GuidedDecoding("json_schema", '{"type": "object"}'),
        top_p_decay=0.9,
        top_p_min=0.1,
        top_p_reset_id=7,
        return_logits=True,
        draft_token_ids=np.array([3, 4]),
        retention=[(0, 8, 90), (8, -1, 0)],
    )
    assert params.logit_bias == {3: -math.inf, 5: 0.5} and params.retention == ((0, 8, 90), (8, -1, 0))
    copy = SamplingParams(**json.loads(json.dumps(dataclasses.asdict(params))))
    assert copy == params and hash(copy) == hash(params)
    assert SamplingParams(logit_bias={}).logit_bias is None
    lowest = float(np.finfo(np.float32).min)
    assert SamplingParams(logit_bias={1: lowest, 2: -1e9, 3: -(10**400)}).logit_bias == {
        1: -math.inf,
        2: -1e9,
        3: -math.inf,
    }
    assert SamplingParams(guided_decoding={"kind": "json_schema", "guide": {"type": "object"}}) == SamplingParams(
        guided_decoding=GuidedDecoding("json_schema", '{"type": "object"}')
    )
    assert SamplingParams(guided_decoding={"kind": "json", "guide": None}).guided_decoding == GuidedDecoding("json")


@pytest.mark.parametrize("changes", [{"logit_bias": {64: 1.0}}, {"draft_token_ids": [3, 64]}])
def test_ids_of_another_model_are_refused(changes):
    engine = LLMEngine(session=FakeSession(), num_pages=40)
    with pytest.raises(RequestError, match=f"{next(iter(changes))} holds token id 64, but the model's ids are 0 to 63"):
        engine.add_request("r", [5], SamplingParams(**changes))
    assert not engine.has_unfinished()
