"""Sampling parameters in vLLM's words, and the names of those that it cannot honour."""

import json
import math
from typing import Any

import pytest

from kvforge.common.errors import RequestError
from kvforge.runtime import SamplingParams
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from kvforge.runtime.requests.reasoning import ReasoningForm, after_reasoning
from kvforge.vllm_engine.params import check_honoured, guide_fields, vllm_fields


def fields(index: int = 0, max_tokens: int = 16, stop_ids: tuple[int, ...] = (2, 1), **given: Any) -> dict[str, Any]:
    params = SamplingParams(**given)
    check_honoured(params)
    return vllm_fields(params, max_tokens, stop_ids, params.bad_words_ids, index)


def test_what_is_said_of_sampling_arrives() -> None:
    found = fields(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=0.5, frequency_penalty=-1.5,
        repetition_penalty=1.25, min_tokens=3, logprobs=5, seed=7, logit_bias={3: 2.5, 4: -math.inf},
        bad_words_ids=[[5, 6], [7]],
    )  # fmt: skip
    assert found == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 0.5,
        "frequency_penalty": -1.5, "repetition_penalty": 1.25, "max_tokens": 16, "min_tokens": 3, "logprobs": 5,
        "seed": 7, "logit_bias": {3: 2.5, 4: -math.inf}, "_bad_words_token_ids": [[5, 6], [7]],
        "stop_token_ids": [1, 2], "ignore_eos": True, "detokenize": False,
    }  # fmt: skip


def test_what_is_left_out_is_left_to_vllm() -> None:
    assert fields().keys().isdisjoint({"seed", "logit_bias", "_bad_words_token_ids"})
    assert fields(top_k=-1)["top_k"] == 0


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 1e-7}, {"top_k": 1}, {"top_k": 1, "seed": 3}])
def test_greedy_is_vllms_greedy(given: dict[str, Any]) -> None:
    found = fields(**given, top_p=0.5, min_p=0.5)
    assert (found["temperature"], found["top_p"], found["top_k"], found["min_p"]) == (0.0, 1.0, 0, 0.0)


def test_each_sequence_has_a_seed_of_its_own() -> None:
    assert [fields(index, seed=2**63 - 1)["seed"] for index in range(3)] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert fields(seed=-1)["seed"] != -1  # which vLLM takes for no seed
    assert fields(1, seed=2**64 - 1)["seed"] == 0


def test_a_request_that_is_cut_short_needs_no_more_tokens_than_fit() -> None:
    assert fields(max_tokens=4, min_tokens=9)["min_tokens"] == 4


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("draft_token_ids", {"draft_token_ids": [1]}),
        ("return_logits", {"return_logits": True}),
        ("retention", {"retention": [(0, 4, 50)]}),
        ("top_p_decay", {"top_p_decay": 0.5}),
        ("top_p_min", {"top_p_min": 0.5}),
        ("top_p_reset_id", {"top_p_reset_id": 3}),
        ("logprobs beside guided_decoding", {"logprobs": 1, "guided_decoding": {"kind": "json"}}),
        ("temperature is 2.5", {"temperature": 2.5}),
        ("temperature is 0.001", {"temperature": 0.001}),
        ("presence_penalty is -3", {"presence_penalty": -3.0}),
        ("frequency_penalty is 2.5", {"frequency_penalty": 2.5}),
    ],
)
def test_what_vllm_cannot_honour_is_refused_by_its_name(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=name):
        check_honoured(SamplingParams(**given))


def test_a_temperature_that_nothing_asks_for_is_passed_over() -> None:
    check_honoured(SamplingParams(temperature=50.0, top_k=1))


def test_guides() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    found = json.loads(guide_fields(GuidedDecoding("json_schema", json.dumps(schema)))["json"])
    assert found.pop("x-guidance")["whitespace_pattern"] and found == schema
    assert json.loads(guide_fields(GuidedDecoding("json"))["json"])["type"] == "object"
    assert guide_fields(GuidedDecoding("regex", "a+")) == {"regex": "a+"}
    assert guide_fields(GuidedDecoding("ebnf_grammar", 'root ::= "a"')) == {"grammar": 'root ::= "a"'}
    structures = [{"begin": "<f>(", "schema": {"type": "boolean"}, "end": ")"}]
    tag = GuidedDecoding("structural_tag", {"triggers": ["<f>"], "structures": structures})  # type: ignore[arg-type]
    assert '_trig[lazy]: TAG_TEXT "<f>"' in guide_fields(tag)["grammar"]
    assert "TAG_TEXT <f>" in guide_fields(tag, ["<f>"])["grammar"], "a special token"
    later = after_reasoning(ReasoningForm((5,), (6,)), GuidedDecoding("regex", "a+"))
    grammar = guide_fields(later)["grammar"]
    assert "<[6]>" in grammar and "start: /a+/" in grammar and not grammar.startswith("{"), "vLLM takes Lark here"
    with pytest.raises(RequestError, match="no JSON object"):
        guide_fields(GuidedDecoding("json_schema", "[1]"))


def test_the_grammar_of_a_schema_is_that_of_our_engines() -> None:
    """llguidance reads whitespace from the schema as it does from the options that our engines give."""
    llguidance = pytest.importorskip("llguidance")
    from kvforge.runtime.guides.grammar import _WHITESPACE

    guide = guide_fields(GuidedDecoding("json_schema", '{"type": "object"}'))["json"]
    assert json.loads(guide)["x-guidance"] == {"whitespace_pattern": _WHITESPACE}
    assert not llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(guide))
