"""Input tensors to a request: defaults of TensorRT-LLM, word tables, refusals that name the tensor."""

import random

import numpy as np
import pytest

from kvforge.common.refusals import PROMPT, UNKNOWN_TOKEN, Refusal
from kvforge.runtime.requests.params import SamplingParams
from kvforge.serving.contract.parameters import stop_token_ids
from kvforge.serving.contract.refusal_words import sentence
from kvforge.serving.contract.request import check_one_response, is_stop, parse_batch, wrap_token_ids
from kvforge.serving.contract.word_lists import decode_words, encode_words
from tests.support.serving.refusals import refused

BASE = {
    "input_ids": np.array([[5, 6, 7, 0]], np.int32),
    "input_lengths": np.array([[3]], np.int32),
    "request_output_len": np.array([[9]], np.int32),
}


def parsed(**tensors):
    arrays = {name: np.asarray(value) for name, value in tensors.items()}
    (request,) = parse_batch({**BASE, **arrays}, exclude_input_default=True)
    SamplingParams(**request.params)
    return request


def test_defaults_are_greedy_and_whole_answer() -> None:
    request = parsed()
    assert request.prompt == [5, 6, 7]
    assert (request.streaming, request.exclude_input, request.num_sequences) == (False, True, 1)
    assert request.params == {"max_tokens": 9, "n": 1, "temperature": 0.0}


def test_the_models_own_end_token_stands_for_all_of_them() -> None:
    """As preprocessing sends it with every text; another one, or none, is the client's choice."""
    own = {"ignore_eos": True, "stop_token_ids": [7]}
    for end_id, more in ((2, {}), (7, own), (-1, own | {"stop_token_ids": []})):
        (request,) = parse_batch({**BASE, "end_id": np.array([[end_id]], np.int32)}, True, end_id=2)
        assert request.params == {"max_tokens": 9, "n": 1, "temperature": 0.0, **more}


def test_any_number_is_a_token_for_load_tests() -> None:
    ids = np.array([[5, 2**31 - 1, -3, 100]], np.int32)
    wrapped = wrap_token_ids({**BASE, "input_ids": ids}, 100)
    assert wrapped["input_ids"].tolist() == [[5, 47, 97, 0]] and wrapped["input_ids"].dtype == np.int32
    assert wrap_token_ids({"a": ids}, 100)["a"] is ids
    said = sentence(Refusal("holds token id 9", "use the engine's tokenizer", PROMPT, UNKNOWN_TOKEN))
    assert said.startswith("the prompt holds token id 9; ")
    assert said.endswith("use the engine's tokenizer, or start the server with --wrap-token-ids for a load test")


def test_temperature_alone_stays_greedy_as_in_tensorrt_llm() -> None:
    assert parsed(temperature=[[0.7]]).params["temperature"] == 0.0


def test_sampling_parameters() -> None:
    request = parsed(runtime_top_k=[[4]], temperature=[[0.5]], seed=np.array([[2**63 + 1]], np.uint64),
                     min_tokens=[[2]], return_log_probs=[[True]], num_return_sequences=[[3]])  # fmt: skip
    assert request.params == {"max_tokens": 9, "n": 3, "temperature": 0.5, "top_k": 4,
                              "seed": 2**63 + 1, "min_tokens": 2, "logprobs": 0}  # fmt: skip


def test_inputs_of_the_whole_contract() -> None:
    request = parsed(
        embedding_bias=np.array([[0, 0, 1.5, -2]], np.float32), draft_input_ids=[[4, 5]], runtime_top_p=[[0.5]],
        runtime_top_p_decay=[[0.5]], runtime_top_p_min=[[0.25]], runtime_top_p_reset_ids=[[3]],
        retention_token_range_starts=[[0, 4]], retention_token_range_ends=[[4, -1]],
        retention_token_range_priorities=[[80, 10]], guided_decoding_guide_type=np.array([[b"regex"]], object),
        guided_decoding_guide=np.array([[b"a+"]], object), return_generation_logits=[[True]],
        stop_strings=np.array([[b"end", b""]], object), num_top_log_probs=[[3]], min_p=[[0.25]],
        num_prompt_log_probs=[[2]],
    )  # fmt: skip
    assert request.params == {
        "max_tokens": 9, "n": 1, "top_p": 0.5, "top_p_decay": 0.5, "top_p_min": 0.25, "top_p_reset_id": 3, "seed": 0,
        "logit_bias": {2: 1.5, 3: -2.0}, "draft_token_ids": [4, 5], "retention": [(0, 4, 80), (4, -1, 10)],
        "guided_decoding": {"kind": "regex", "guide": "a+"}, "return_logits": True, "stop": ["end"], "logprobs": 3,
        "min_p": 0.25, "prompt_logprobs": 2,
    }  # fmt: skip


@pytest.mark.parametrize(("end_id", "stop_ids"), [(17, [17]), (-1, [])])
def test_end_id_replaces_the_engines(end_id: int, stop_ids: list[int]) -> None:
    params = parsed(end_id=[[end_id]]).params
    assert (params["ignore_eos"], params["stop_token_ids"]) == (True, stop_ids)


def test_batch_rows_are_requests_of_their_own() -> None:
    tensors = {
        "input_ids": np.array([[5, 6, 7], [8, 9, 0]], np.int32),
        "input_lengths": np.array([[3], [2]], np.int32),
        "request_output_len": np.array([[1], [2]], np.int32),
    }
    first, second = parse_batch(tensors, exclude_input_default=False)
    assert (first.prompt, first.params["max_tokens"]) == ([5, 6, 7], 1)
    assert (second.prompt, second.params["max_tokens"]) == ([8, 9], 2)
    with refused("different batch sizes"):
        parse_batch({**tensors, "end_id": np.array([[1]])}, exclude_input_default=False)


def test_word_tables_round_trip() -> None:
    rng = random.Random(1)
    for _ in range(200):
        words = [[rng.randrange(99) for _ in range(rng.randrange(1, 5))] for _ in range(rng.randrange(6))]
        assert decode_words("stop_words_list", encode_words(words)) == words


@pytest.mark.parametrize("table", [[[1, 2], [3, -1]], [[1, 2], [2, 1]], [[1, 2], [0, -1]], [[1, 2]]])
def test_broken_word_tables_are_refused(table: list) -> None:
    with refused("stop_words_list"):
        decode_words("stop_words_list", np.array(table))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"input_lengths": [[5]]}, "'input_lengths' is 5"),
        ({"input_lengths": [[-1]]}, "'input_lengths' is -1"),
        ({"input_lengths": [[0]]}, "the prompt is empty"),
        ({"request_output_len": [[0]]}, "'request_output_len' .'max_tokens' of ensemble. is 0; give a whole number"),
        ({"num_return_sequences": [[0]]}, "'num_return_sequences' is 0; give a whole number from 1 to 256"),
        (
            {"num_return_sequences": [[2**31 - 1]]},
            "'num_return_sequences' is 2147483647; give a whole number from 1 to 256",
        ),
        ({"temperature": [[float("nan")]], "runtime_top_k": [[3]]}, "'temperature' is nan; give a finite number"),
        ({"temperature": [[1.0, 2.0]]}, "'temperature' must hold one value, not 2"),
        ({"beam_width": [[2]]}, "'beam_width' cannot be used"),
        ({"num_top_log_probs": [[21]]}, "'num_top_log_probs' must be 0 to 20, not 21"),
        ({"num_prompt_log_probs": [[-2]]}, "'num_prompt_log_probs' must be -1 to 20, not -2"),
        ({"retention_token_range_starts": [[1]]}, "1 'retention_token_range_starts', 0 'retention_token_range_ends'"),
        ({"embedding_bias": [[float("nan")]]}, "'embedding_bias' .* of token 0 is nan"),
        ({"draft_input_ids": [[-1]]}, "'draft_input_ids' holds -1"),
        ({"runtime_top_p_min": [[2.0]]}, "'runtime_top_p_min' is 2.0"),
        ({"presence_penalty": [[float("inf")]]}, "'presence_penalty' is inf; give a finite number"),
        ({"guided_decoding_guide": np.array([[b"x"]], object)}, "needs 'guided_decoding_guide_type'"),
        ({"guided_decoding_guide_type": np.array([[b"xml"]], object)}, "guided_decoding_guide"),
        ({"stop_strings": np.array([[b"\xff"]], object)}, "'stop_strings' is not valid UTF-8"),
    ],
)
def test_refusals(tensors: dict, words: str) -> None:
    with refused(words):
        parsed(**tensors)


@pytest.mark.parametrize("name", BASE)
def test_missing_tensors_are_named(name: str) -> None:
    with refused(name):
        parse_batch({key: value for key, value in BASE.items() if key != name}, True)


def test_stop_request() -> None:
    assert is_stop({"stop": np.array([[True]])})
    assert not is_stop(BASE)


def test_stop_tokens_of_the_parameters() -> None:
    assert stop_token_ids({}) == [] and stop_token_ids({"stop_token_ids": ""}) == []
    assert stop_token_ids({"stop_token_ids": "5,70000"}) == [5, 70000]
    for value in ("5,", "-1", "a", "5, 6", "\u0665", 5, True, "5" * 11, "1," * 40000 + "1"):
        with refused("cannot be used"):
            stop_token_ids({"stop_token_ids": value})
    end = {"end_id": np.array([[7]], dtype=np.int32)}
    for tensors, expected in (({}, [5, 6]), (end, [7, 5, 6])):
        (request,) = parse_batch({**BASE, **tensors}, True, [5, 6])
        assert request.params["stop_token_ids"] == expected
        assert request.params.get("ignore_eos", False) == bool(tensors)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"streaming": np.array([[True]])}, "Streaming is only supported if model is deployed using decoupled mode"),
        ({"num_return_sequences": np.array([[2]])}, "several sequences"),
    ],
)
def test_what_one_response_cannot_hold(more: dict, message: str) -> None:
    check_one_response(parse_batch(BASE, True))
    with refused(message):
        check_one_response(parse_batch({**BASE, **more}, True))
    with refused("several prompts"):
        check_one_response(parse_batch({name: np.repeat(array, 2, 0) for name, array in BASE.items()}, True))
