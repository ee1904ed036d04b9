"""What the official client reads from answers, whole and streamed, over a Triton that is told what to say."""

import json

import openai
import pytest

from tests.cpu.gateway.fake_triton import FakeTriton, Row, bytes_of
from tests.cpu.gateway.http_calls import post

HELLO = [{"role": "user", "content": "hi"}]


def test_models(client: openai.OpenAI) -> None:
    card = client.models.list().data[0]
    assert (card.id, card.object, card.owned_by, card.max_model_len) == ("tiny", "model", "kvforge", 4096)
    assert client.models.retrieve("tiny") == card


def test_completion(client: openai.OpenAI, triton: FakeTriton) -> None:
    answer = client.completions.create(model="tiny", prompt="abc")
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3  # one page of 16, but no more than the prompt
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    request = triton.requests[0]
    assert request.prompt == [ord(char) + 3 for char in "abc"]
    assert request.value("request_output_len") == 16
    assert request.value("temperature") == request.value("runtime_top_p") == 1.0
    assert not request.value("streaming")


@pytest.mark.parametrize("named", [{}, {"model": None}])
def test_a_request_without_a_model_means_the_one_that_is_served(named: dict, url: str, triton: FakeTriton) -> None:
    for path, body in (("completions", {"prompt": "abc"}), ("chat/completions", {"messages": HELLO})):
        answer = post(f"{url}/v1/{path}", {**body, **named})
        assert answer.status == 200 and json.loads(answer.body)["model"] == "tiny"
    assert post(f"{url}/v1/responses", {"input": "hi", **named}).status == 200


def test_chat(client: openai.OpenAI, triton: FakeTriton) -> None:
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hello"
    written = bytes(token - 3 for token in triton.requests[0].prompt).decode()
    assert written == "[system]be[user]hi[assistant]"
    # As much as the context holds.
    assert triton.requests[0].value("request_output_len") == 4096 - len(written)


@pytest.mark.parametrize("text", ["héllo wörld", "日本語 😀!", "plain"])
def test_streamed_pieces_are_whole_characters(client: openai.OpenAI, triton: FakeTriton, text: str) -> None:
    triton.script = lambda request: bytes_of(text, request)
    chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
    assert pieces == list(text)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    pieces = [chunk.choices[0].text for chunk in client.completions.create(model="tiny", prompt="a", stream=True)]
    assert pieces == list(text)


def test_stream_usage(client: openai.OpenAI, triton: FakeTriton) -> None:
    options = {"include_usage": True}
    chunks = list(client.completions.create(model="tiny", prompt="abc", stream=True, stream_options=options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 5


def test_several_sequences_and_prompts(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.script = lambda request: bytes_of("".join(map(chr, (t - 3 for t in request.prompt))) + "!", request)
    prompts = ["abc", "de"]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, seed=7, extra_body={"best_of": 2})
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(["abc!", "abc!", "de!", "de!"]))
    assert answer.usage.prompt_tokens == 5 and answer.usage.completion_tokens == 2 * (4 + 3)
    assert {request.value("num_return_sequences") for request in triton.requests} == {2}
    assert {request.value("seed") for request in triton.requests} == {7}
    texts = ["", "", "", ""]
    for chunk in client.completions.create(model="tiny", prompt=prompts, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["abc!", "abc!", "de!", "de!"]
    ids = client.completions.create(model="tiny", prompt=[[100, 101], [102]])
    assert [choice.text for choice in ids.choices] == ["ab!", "c!"]


def test_echo(client: openai.OpenAI, triton: FakeTriton) -> None:
    for prompt in ("abc", [100, 101, 102]):
        assert client.completions.create(model="tiny", prompt=prompt, echo=True).choices[0].text == "abchello"
        chunks = client.completions.create(model="tiny", prompt=prompt, echo=True, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "abchello"


def test_stop_string_is_cut_exactly(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.script = lambda request: bytes_of("one STOP", request, "stop", "STOP")
    answer = client.completions.create(model="tiny", prompt="a", stop=["STOP", "end"])
    assert (answer.choices[0].text, answer.choices[0].stop_reason) == ("one ", "STOP")
    assert triton.requests[0].texts("stop_strings") == ["STOP", "end"]
    chunks = list(client.completions.create(model="tiny", prompt="a", stop="STOP", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one "
    assert triton.requests[1].texts("stop_strings") == ["STOP"]


def test_stop_token(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.script = lambda request: bytes_of("ab.", request, "stop", [ord(".") + 3])
    body = {"stop_token_ids": [ord(".") + 3, 9]}
    choice = client.completions.create(model="tiny", prompt="a", extra_body=body).choices[0]
    assert (choice.text, choice.stop_reason) == ("ab", ord(".") + 3)
    assert triton.requests[0].parameters["stop_token_ids"] == f"{ord('.') + 3},9"
    client.completions.create(model="tiny", prompt="a", extra_body={"stop_token_ids": [9], "ignore_eos": True})
    assert triton.requests[1].parameters["stop_token_ids"] == "9" and triton.requests[1].value("end_id") == -1


def test_end_of_text_is_no_text(client: openai.OpenAI, triton: FakeTriton) -> None:
    async def script(request):
        yield Row([100, 101], log_probs=[-1.0, -2.0], top=[{}, {}])
        yield Row([2], log_probs=[-3.0], top=[{}], finish_reason="stop")

    triton.script = script
    answer = client.completions.create(model="tiny", prompt="x", logprobs=0)
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("ab", 3)
    assert answer.choices[0].logprobs.tokens == ["a", "b", "</s>"]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2]


def test_long_answers_are_cut_into_slices_without_a_seam(client: openai.OpenAI, triton: FakeTriton) -> None:
    text = "ü€😀 " * 200
    triton.script = lambda request: bytes_of(text, request)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=3000).choices[0].text == text


def test_parameters_reach_the_engine(client: openai.OpenAI, triton: FakeTriton) -> None:
    client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0.5, top_p=0.25, presence_penalty=1.5, frequency_penalty=-0.5,
        seed=-1, logit_bias={"5": -100, "7": 2.5}, max_completion_tokens=9, n=1, user="me", store=False, tools=[],
        extra_body={"top_k": 4, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 2},
    )  # fmt: skip
    request = triton.requests[0]
    sent = {name: request.value(name) for name in request.tensors if name not in ("input_ids", "embedding_bias")}
    assert sent == {
        "input_lengths": len("[user]hi[assistant]"), "request_output_len": 9, "streaming": False, "temperature": 0.5,
        "runtime_top_p": 0.25, "runtime_top_k": 4, "min_p": 0.125, "min_tokens": 2, "repetition_penalty": 1.5,
        "presence_penalty": 1.5, "frequency_penalty": -0.5, "seed": 2**64 - 1, "return_perf_metrics": True,
    }  # fmt: skip
    bias = request.tensors["embedding_bias"][0]
    assert bias.shape == (320,) and {int(i): float(bias[i]) for i in bias.nonzero()[0]} == {5: -100.0, 7: 2.5}


def test_seeds_differ_where_none_is_given(client: openai.OpenAI, triton: FakeTriton) -> None:
    for _ in range(3):
        client.completions.create(model="tiny", prompt="x")
    assert len({request.value("seed") for request in triton.requests}) == 3


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "kind", "guide"),
    [
        ({"response_format": {"type": "json_object"}}, "json", None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, "json_schema",
         SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, "regex", "a\\.b|c"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "[0-9]"}, "regex", "[0-9]"),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf_grammar", 'root ::= "a"'),
    ],
)  # fmt: skip
def test_guides(client: openai.OpenAI, triton: FakeTriton, body: dict, kind: str, guide: object) -> None:
    client.completions.create(model="tiny", prompt="x", extra_body=body)
    request = triton.requests[0]
    assert request.texts("guided_decoding_guide_type") == [kind]
    if guide is None:
        assert "guided_decoding_guide" not in request.tensors
    else:
        text = request.texts("guided_decoding_guide")[0]
        assert (json.loads(text) if isinstance(guide, dict) else text) == guide


def test_no_guide(client: openai.OpenAI, triton: FakeTriton) -> None:
    client.completions.create(model="tiny", prompt="x", extra_body={"response_format": {"type": "text"}})
    assert "guided_decoding_guide_type" not in triton.requests[0].tensors


def test_nothing_but_the_prompt(client: openai.OpenAI, triton: FakeTriton) -> None:
    ask = {"model": "tiny", "prompt": ["ab", "c"], "max_tokens": 0, "echo": True, "n": 2}
    answer = client.completions.create(**ask)
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "c", "c"]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
    texts = ["", "", "", ""]
    for chunk in client.completions.create(**ask, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["ab", "ab", "c", "c"] and triton.requests == []


@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_best_of_several(client: openai.OpenAI, triton: FakeTriton, logprobs: int | None) -> None:
    """Of each prompt's four sequences the two with the highest mean, however long they are."""
    texts = {0: ("a", [-1.0]), 1: ("bb", [-0.5, -0.5]), 2: ("cccc", [-0.25] * 4), 3: ("d", [-3.0])}

    async def script(request):
        for sequence, (text, values) in texts.items():
            tokens = [ord(char) + 3 for char in text]
            yield Row(tokens, sequence, values, [{token: -0.25} for token in tokens], "length")

    triton.script = script
    ask = {"model": "tiny", "prompt": ["x", "y"], "n": 2, "best_of": 4, "logprobs": logprobs}
    answer = client.completions.create(**ask)
    found = [(choice.index, choice.text) for choice in answer.choices]
    assert found == [(0, "cccc"), (1, "bb"), (2, "cccc"), (3, "bb")]
    assert answer.usage.completion_tokens == 2 * 8
    assert [choice.logprobs is not None for choice in answer.choices] == [logprobs is not None] * 4
    request = triton.requests[0]
    assert request.value("num_return_sequences") == 4 and request.value("return_log_probs")
