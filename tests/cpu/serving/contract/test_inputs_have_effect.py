"""Every input and parameter that `tensorrt_llm` accepts: two values are two requests to the engine, or it is listed as
without effect, with the reason. What the engine makes of them, tests/e2e/test_contract_tensors.py sees."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvforge.serving.contract import inputs, parameters
from kvforge.serving.contract.request import is_stop, parse_batch
from kvforge.serving.contract.stream_keys import STREAM_KEY
from kvforge.serving.server.repository import repository_templates
from tests.support.serving.refusals import refused

BASE = {
    "input_ids": np.array([[5, 6, 7, 8]], np.int32), "input_lengths": np.array([[3]], np.int32),
    "request_output_len": np.array([[9]], np.int32),
}  # fmt: skip
SAMPLED = {"runtime_top_k": [[5]]}
RANGES = {f"retention_token_range_{part}": [[value]] for part, value in (("starts", 0), ("ends", 2), ("priorities", 9))}
GUIDE = {"guided_decoding_guide_type": [[b"regex"]], "guided_decoding_guide": [[b"a"]]}
WORDS = [[[5], [1]]], [[[6], [1]]]
PAIRS: dict[str, tuple[Any, ...]] = {
    "input_ids": ([[1, 2, 3]], [[3, 2, 1]]), "input_lengths": ([[2]], [[3]]), "request_output_len": ([[2]], [[3]]),
    "num_return_sequences": ([[1]], [[2]]), "end_id": ([[1]], [[3]]), "stop_words_list": WORDS, "bad_words_list": WORDS,
    "embedding_bias": ([[1.0, 0]], [[0, 1.0]]), "temperature": ([[0.5]], [[0.25]], SAMPLED),
    "runtime_top_k": ([[5]], [[6]]), "runtime_top_p": ([[0.5]], [[0.25]]), "runtime_top_p_min": ([[0.5]], [[0.25]]),
    "runtime_top_p_decay": ([[0.5]], [[0.25]]), "runtime_top_p_reset_ids": ([[5]], [[6]]),
    "repetition_penalty": ([[1.5]], [[2.0]]), "min_tokens": ([[1]], [[2]]), "presence_penalty": ([[0.5]], [[1.0]]),
    "frequency_penalty": ([[0.5]], [[1.0]]), "seed": ([[5]], [[6]], SAMPLED), "draft_input_ids": ([[5]], [[6]]),
    "return_log_probs": ([[True]], [[False]]), "return_generation_logits": ([[True]], [[False]]),
    "return_perf_metrics": ([[True]], [[False]]), "return_num_input_tokens": ([[True]], [[False]]),
    "return_num_output_tokens": ([[True]], [[False]]), "exclude_input_in_output": ([[True]], [[False]]),
    "stop": ([[True]], [[False]]), "streaming": ([[True]], [[False]]),
    "retention_token_range_starts": ([[0]], [[1]], RANGES), "retention_token_range_ends": ([[2]], [[3]], RANGES),
    "retention_token_range_priorities": ([[5]], [[6]], RANGES),
    "guided_decoding_guide_type": ([[b"regex"]], [[b"ebnf_grammar"]], GUIDE),
    "guided_decoding_guide": ([[b"a"]], [[b"b"]], GUIDE), "stop_strings": ([[b"a"]], [[b"b"]]),
    "num_top_log_probs": ([[1]], [[2]]), "num_prompt_log_probs": ([[1]], [[2]]), "min_p": ([[0.5]], [[0.25]]),
}  # fmt: skip


def asked(given: dict[str, Any]) -> Any:
    """What the engine is asked for, or that the request ends another one."""
    kinds = {name: object if isinstance(value[0][0], bytes) else None for name, value in given.items()}
    arrays = {name: np.asarray(value, kinds[name]) for name, value in given.items()}
    tensors = inputs.with_todays_names({**BASE, **arrays})
    return is_stop(tensors), parse_batch(tensors, exclude_input_default=True)


def test_every_input_of_the_model_is_walked() -> None:
    text = (repository_templates() / "tensorrt_llm" / "config.pbtxt").read_text()
    names = set(re.findall(r'name: "(\w+)"', text[text.index("input [") : text.index("output [")]))
    fates = {*PAIRS, *inputs.WITHOUT_EFFECT, *inputs.UNSUPPORTED, *inputs.ALIASES, STREAM_KEY}
    assert names <= fates, f"{names - fates} have no fate in kvforge/serving/contract/inputs.py"
    assert set(PAIRS) == inputs.SUPPORTED, f"{set(PAIRS) ^ inputs.SUPPORTED}: give each input two values in PAIRS"
    assert names >= inputs.SUPPORTED


@pytest.mark.parametrize("name", PAIRS)
def test_two_values_are_two_requests(name: str) -> None:
    one, other, *more = PAIRS[name]
    rest = more[0] if more else {}
    assert asked({**rest, name: one}) != asked({**rest, name: other})


@pytest.mark.parametrize("name", inputs.ALIASES)
def test_earlier_names_are_read(name: str) -> None:
    assert asked({**SAMPLED, name: [[1]]}) != asked({**SAMPLED, name: [[2]]})


@pytest.mark.parametrize("name", inputs.WITHOUT_EFFECT)
def test_inputs_without_effect_have_a_reason(name: str) -> None:
    assert len(inputs.WITHOUT_EFFECT[name]) > 10 and asked({name: [[1]]}) == asked({name: [[2]]})


@pytest.mark.parametrize("name", sorted(parameters.OWN))
def test_own_parameters_are_read(name: str) -> None:
    read = {
        parameters.DRAFT_SCOPE: lambda value: parameters.draft_scope({name: str(value)}),
        parameters.ERRORS_AS_TENSORS: lambda value: parameters.wants_errors_as_tensors(
            SimpleNamespace(parameters=lambda: f'{{"{name}": {str(value).lower()}}}')
        ),
        parameters.STOP_TOKEN_IDS: lambda value: parameters.stop_token_ids({name: "5" if value else "6"}),
        parameters.STREAM_INTERVAL: lambda value: parameters.stream_interval({name: int(value)}, 3),
        parameters.KEEP_END_TOKEN: lambda value: parameters.flag({name: value}, name, False),
    }[name]
    parameters.check_parameters({name: 1}, ())
    assert read(True) != read(False)


@pytest.mark.parametrize("name", parameters.WITHOUT_EFFECT)
def test_parameters_without_effect_have_a_reason(name: str) -> None:
    assert len(parameters.WITHOUT_EFFECT[name]) > 10 and name not in parameters.OWN | parameters.TRITONS
    parameters.check_parameters({name: 1}, (), own=())


def test_a_model_that_does_not_read_a_parameter_refuses_it() -> None:
    for name in parameters.OWN:
        with refused(f"'{name}' is no input of this model and no request parameter"):
            parameters.check_parameters({name: 1}, (), own=())
