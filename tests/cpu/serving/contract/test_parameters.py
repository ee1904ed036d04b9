"""Request parameters: what they may be, and what refusing them costs."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvforge.common.errors import RequestError
from kvforge.runtime import SamplingParams
from kvforge.serving.contract.parameters import (
    MAX_NAME,
    MAX_TEXT,
    check_parameters,
    draft_scope,
    read_parameters,
    timeout_s,
    wants_errors_as_tensors,
)
from tests.support.serving.refusals import refused


def request(parameters: dict[str, Any] | str) -> Any:
    text = parameters if isinstance(parameters, str) else json.dumps(parameters)
    return SimpleNamespace(parameters=lambda: text, timeout=lambda: 0)


@pytest.mark.parametrize("value", [True, 1.5, -5, "-5", "x", 2**64 - 5, float("nan"), [1]])
def test_timeouts_that_are_no_whole_microseconds_are_refused(value: Any) -> None:
    with refused("give whole microseconds of at least 0"):
        timeout_s(request({}), {"timeout": value})


@pytest.mark.parametrize(("value", "seconds"), [(1_500_000, 1.5), ("1000", 0.001), (2e6, 2.0), (0, None)])
def test_timeouts(value: Any, seconds: float | None) -> None:
    assert timeout_s(request({}), {"timeout": value}) == seconds


def test_refusals_name_what_the_client_sent() -> None:
    with refused("^the request parameter 'draft_scope' cannot be used; give a text"):
        draft_scope({"draft_scope": 5})
    with refused("^input tensor 'end_id' or the request parameter 'stop_token_ids' holds "):
        SamplingParams(stop_token_ids=(-1,))
    with refused(r"; lower it or raise 'request_output_len' \('max_tokens' of ensemble\)$"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_too_many_are_refused_before_they_are_read() -> None:
    """The text is no JSON: who tried to read it would say so."""
    asked = request("{" * (MAX_TEXT + 1))
    with refused(f"give at most {MAX_TEXT}"):
        read_parameters(asked)
    assert not wants_errors_as_tensors(asked)
    assert read_parameters(request({"a": "x" * (MAX_TEXT - 20)}))


def test_long_names_are_not_repeated() -> None:
    with pytest.raises(RequestError) as refused:
        check_parameters({"y" * 100_000: 1}, ["text_input"])
    assert len(str(refused.value)) < 2 * MAX_NAME


def test_a_model_takes_its_own_alone() -> None:
    check_parameters({"stop_token_ids": "1,2"}, ["text_input"])
    with refused("'stop_token_ids' is no input of this model"):
        check_parameters({"stop_token_ids": "1,2"}, ["text_input"], own=())
