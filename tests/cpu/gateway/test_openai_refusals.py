"""Every request that cannot be served gets OpenAI's error envelope, the right status and the field's name."""

import asyncio
import json
from typing import Any

import openai
import pytest

from kvforge.runtime.requests.outputs import NO_TOKEN_LEFT
from tests.cpu.gateway.fake_triton import FakeTriton, Refusal, Row
from tests.cpu.gateway.http_calls import Answer, call, post, wait_until

HELLO = [{"role": "user", "content": "hi"}]
COMPLETION = {"model": "tiny", "prompt": "x"}
CHAT = {"model": "tiny", "messages": HELLO}


def check(answer: Answer, status: int, param: str | None, words: str = "") -> None:
    assert answer.status == status, answer.body
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert words in error["message"], error
    assert "\n" not in error["message"] and len(error["message"]) < 700


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("model", 5, "model"),
        ("model", "\ud800", "model"),
        ("prompt", None, "prompt"),
        ("prompt", "", "prompt"),
        ("prompt", [], "prompt"),
        ("prompt", [[]], "prompt"),
        ("prompt", ["a", 5], "prompt"),
        ("prompt", [5, "a"], "prompt"),
        ("prompt", [True], "prompt"),
        ("prompt", [320], "prompt"),
        ("prompt", [-1], "prompt"),
        ("prompt", [2**70], "prompt"),
        ("prompt", {"a": 1}, "prompt"),
        ("prompt", "\ud800", "prompt"),
        ("prompt", ["x"] * 129, "prompt"),
        ("prompt", "x" * 4096, "prompt"),
        ("prompt", "x" * 4090, "prompt"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", "16", "max_tokens"),
        ("max_tokens", 10**400, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("n", 0, "n"),
        ("n", 129, "n"),
        ("n", True, "n"),
        ("best_of", 0, "best_of"),
        ("best_of", 129, "best_of"),
        ("temperature", -1, "temperature"),
        ("temperature", "hot", "temperature"),
        ("temperature", 1e300, "temperature"),
        ("top_p", 0, "top_p"),
        ("top_p", 1.5, "top_p"),
        ("top_k", 2.5, "top_k"),
        ("min_p", 2, "min_p"),
        ("min_tokens", 17, "min_tokens"),
        ("presence_penalty", 1e9, "presence_penalty"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("seed", 2**65, "seed"),
        ("seed", "a", "seed"),
        ("stop", ["a"] * 17, "stop"),
        ("stop", [""], "stop"),
        ("stop", 5, "stop"),
        ("stop", "\ud800", "stop"),
        ("stop_token_ids", [320], "stop_token_ids"),
        ("stop_token_ids", "a", "stop_token_ids"),
        ("logit_bias", {"320": 1}, "logit_bias"),
        ("logit_bias", {"a": 1}, "logit_bias"),
        ("logit_bias", [1], "logit_bias"),
        ("logprobs", 21, "logprobs"),
        ("logprobs", True, "logprobs"),
        ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("ignore_eos", 1, "ignore_eos"),
        ("echo", "no", "echo"),
        ("suffix", "end", "suffix"),
        ("use_beam_search", True, "use_beam_search"),
        ("prompt_logprobs", 21, "prompt_logprobs"),
        ("response_format", {"type": "xml"}, "response_format.type"),
        ("response_format", "json", "response_format.type"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        ("structured_outputs", {"yaml": 1}, "structured_outputs.yaml"),
        ("structured_outputs", {"regex": "a", "json": {}}, "structured_outputs"),
        ("guided_choice", [], "guided_choice"),
        ("guided_regex", 5, "guided_regex"),
        ("max_token", 5, "max_token"),
        ("messages", HELLO, "messages"),
    ],
)
def test_completion_fields(url: str, triton: FakeTriton, field: str, value: Any, param: str) -> None:
    check(post(f"{url}/v1/completions", {**COMPLETION, field: value}), 400, param)
    assert triton.requests == []


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", None, "messages"),
        ("messages", [], "messages"),
        ("messages", "hi", "messages"),
        ("messages", ["hi"], "messages[0]"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"role": "king", "content": "x"}], "messages[0].role"),
        ("messages", [*HELLO, {"role": "user", "content": [{"type": "image_url"}]}], "messages[1].content[0]"),
        ("messages", [{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ("messages", [{"role": "user", "content": "x", "mood": "good"}], "messages[0].mood"),
        ("messages", [{"role": "user", "content": "\udfff"}], "messages"),
        ("messages", [{"role": "tool", "content": "5"}], "messages"),
        ("messages", [{"role": "user", "content": "x" * 4096}], "messages"),
        ("tools", [{"type": "function"}], "tools[0]"),
        ("tools", {"a": 1}, "tools"),
        ("functions", [{"name": "f"}], "functions"),
        ("function_call", {"name": "f"}, "function_call"),
        ("parallel_tool_calls", "no", "parallel_tool_calls"),
        ("tool_choice", "required", "tool_choice"),
        ("max_completion_tokens", 5000, "messages"),
        ("max_tokens", -1, "max_tokens"),
        ("logprobs", 1, "logprobs"),
        ("top_logprobs", 2, "top_logprobs"),
        ("chat_template", "{{ 1 }}", "chat_template"),
        ("reasoning_effort", 5, "reasoning_effort"),
        ("reasoning_effort", "x" * 65, "reasoning_effort"),
        ("chat_template_kwargs", [], "chat_template_kwargs"),
        ("chat_template_kwargs", {"a": "x" * 20_000}, "chat_template_kwargs"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
        ("chat_template_kwargs", {"tools": []}, "chat_template_kwargs.tools"),
        ("chat_template_kwargs", {"bos_token": "x"}, "chat_template_kwargs.bos_token"),
        ("chat_template_kwargs", {"add_generation_prompt": False}, "chat_template_kwargs.add_generation_prompt"),
        ("verbosity", "low", "verbosity"),
        ("web_search_options", {}, "web_search_options"),
        ("messages", [{"role": "user", "content": "x", "refusal": "y"}], "messages[0].refusal"),
        ("messages", [{"role": "assistant", "content": None, "refusal": 5}], "messages[0].refusal"),
        ("messages", [{"role": "assistant", "reasoning_details": "x"}], "messages[0].reasoning_details"),
        ("messages", [{"role": "assistant", "thinking_blocks": [{"thinking": 5}]}], "messages[0].thinking_blocks"),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}], "tools[0]"),
        ("prompt", "x", "prompt"),
    ],
)
def test_chat_fields(url: str, triton: FakeTriton, field: str, value: Any, param: str) -> None:
    check(post(f"{url}/v1/chat/completions", {**CHAT, field: value}), 400, param)
    assert triton.requests == []


def test_context_length(url: str) -> None:
    answer = post(f"{url}/v1/completions", {**COMPLETION, "prompt": "x" * 5000})
    assert json.loads(answer.body)["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
     b"[" * 100_000, b'{"model": "tiny", "prompt": "\xc3"}',
     b'{"model": "\xed\xa0\x80"}', b'{"model": "tiny", "prompt": "x", "stop": "\xed\xa0\x80"}',
     '{"model": "tiny", "prompt": "x", "stop": "\\ud800"}'.encode("utf-16"), b'{"seed": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_bodies_that_are_no_json_object(url: str, data: bytes) -> None:
    check(call(url, "POST", "/v1/completions", data), 400, None)


def test_other_paths(client: openai.OpenAI, url: str) -> None:
    for create in (client.completions.create, client.chat.completions.create):
        with pytest.raises(openai.NotFoundError, match="'big' does not exist"):
            create(**{**(COMPLETION if create == client.completions.create else CHAT), "model": "big"})
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")
    check(call(url, "GET", "/v1/nothing"), 404, None)
    check(call(url, "GET", "/v1/completions"), 405, None)
    check(call(url, "GET", "/redoc"), 404, None)


ENGINE_ERRORS = [
    ("refused", "the deadline of the prompt is odd", 400, openai.BadRequestError, "is odd"),
    ("unavailable", "the queue is full: 8 sequences", 429, openai.RateLimitError, "too many"),
    ("unavailable", "guided decoding is not available: 66 jobs wait for a worker; try again.", 429,
     openai.RateLimitError, "too many"),
    ("unavailable", "the server is shutting down; send the request to another server or later", 503,
     openai.InternalServerError, "another server or later"),
    ("unavailable", "engine 0x5 is behind", 503, openai.InternalServerError, "try again later"),
    ("lost", "the engine process ended by signal 9", 503, openai.InternalServerError, "has ended; try again"),
    ("deadline", "its timeout was 3 s", 504, openai.InternalServerError, "deadline has passed"),
    ("cancelled", "the request was cancelled", 499, openai.APIStatusError, "was cancelled"),
    ("failed", "the request failed: KeyError 'x'", 500, openai.InternalServerError, "its log says why"),
    ("failed", "the engine gave up: guided decoding gave up: at 7", 400, openai.BadRequestError, "simplify"),
    ("failed", f"the engine gave up this request: {NO_TOKEN_LEFT}", 400, openai.BadRequestError, "leaves no token"),
    ("triton", "Request for unknown model: 'tensorrt_llm' is not found", 503, openai.InternalServerError, "not loaded"),
    ("triton", "Stub process 'tensorrt_llm_0_0' is not healthy.", 503, openai.InternalServerError, "not loaded"),
    ("triton", "unexpected shape for input 'seed'", 500, openai.InternalServerError, "its log says why"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("outcome", "message", "status", "kind", "words"), ENGINE_ERRORS)
def test_engine_errors(client, triton: FakeTriton, outcome, message, status, kind, words, stream: bool) -> None:
    async def script(request):
        yield Refusal(outcome, message)

    triton.script = script
    with pytest.raises(kind, match=words) as found:
        client.completions.create(**COMPLETION, stream=stream)
    assert found.value.status_code == status
    assert ("retry-after" in found.value.response.headers) == (status in (429, 503))


def test_error_in_the_middle_of_a_stream(client: openai.OpenAI, triton: FakeTriton) -> None:
    async def script(request):
        yield Row([100])
        yield Refusal("lost", "the engine process ended")

    triton.script = script
    texts = []
    with pytest.raises(openai.APIError, match="the engine that worked on this request has ended"):
        for chunk in client.completions.create(**COMPLETION, stream=True):
            texts.append(chunk.choices[0].text)
    assert texts == ["a"]
    with pytest.raises(openai.InternalServerError, match="the engine that worked on this request has ended"):
        client.completions.create(**COMPLETION)


@pytest.mark.parametrize("stream", [False, True])
def test_answer_without_an_end_is_an_error(client: openai.OpenAI, triton: FakeTriton, stream: bool) -> None:
    async def script(request):
        yield Row([100])

    triton.script = script
    with pytest.raises(openai.APIError, match="before its end"):
        list(client.completions.create(**COMPLETION, stream=stream))


def test_one_failing_prompt_ends_all(client: openai.OpenAI, triton: FakeTriton) -> None:
    async def script(request):
        if request.prompt == [100]:
            yield Refusal("failed", "broken")
        while True:
            await asyncio.sleep(0.01)
            yield Row([101])

    triton.script = script
    with pytest.raises(openai.APIError, match="its log says why"):
        client.completions.create(model="tiny", prompt=["b", "a", "b"])
    wait_until(lambda: all(request.cancelled for request in triton.requests if request.prompt != [100]))


REFUSALS = [
    ("input tensor 'runtime_top_k' ('top_k' of ensemble) is -5; give a whole number of at least 0.", "top_k", "is -5"),
    ("input tensor 'request_output_len' ('max_tokens' of ensemble) is missing", "max_completion_tokens", "is missing"),
    ("input tensor 'embedding_bias' has 5 numbers a prompt, but the model's vocabulary has 320", "logit_bias", "has 5"),
    ("input tensor 'stop_strings' has 9 characters together; give at most 4.", "stop", "give at most 4"),
    ("input tensor 'min_tokens' is 9, above max_tokens; lower it.", "min_tokens", "is 9"),
    ("the request parameter 'stop_token_ids' cannot be used; give token ids", "stop_token_ids", "give token ids"),
    ("input tensor 'guided_decoding_guide' cannot be used: the guide of json_schema cannot be used: at 7(8): failed "
     "to compile JSON schema: regex parse error: (( ^ error: unclosed group 5 | 6 | tag_0_trig[lazy]: TAG_TEXT",
     "response_format", "unclosed group"),
    ("input tensor 'guided_decoding_guide' cannot be used: the schema holds 900 references; give at most 500.",
     "response_format", "900 references"),
    ("the guide of json_schema has 70000 bytes; give at most 65536.", "response_format", "65536"),
    ("guided_decoding needs llguidance; install kvforge[serve].", "response_format", "too complex"),
    ("the prompt has 9 tokens, but the engine takes at most 5 (max_seq_len 6 less one to generate); shorten it, or "
     "give a larger --max-seq-len, to the build too, if the model has more than 6 positions.", "messages",
     "the prompt has 9 tokens"),
    ("the prompt holds token id 999, but the model's ids are 0 to 319; use the engine's tokenizer, or start the "
     "server with --wrap-token-ids for a load test", "messages", "token id 999"),
    ("the request's tensors have 9 bytes, but at most 5 are taken; send less or raise --max-request-bytes", None,
     "too large"),
    ("input tensor 'prompt_table' is not offered", None, "is not offered"),
    ("'x' is no input of this model and no request parameter; input tensor 'y'", None, "no request parameter"),
]  # fmt: skip
INNER = ("tensor", "ensemble", "--", "request_output_len", "runtime_", "guided_decoding", "TAG_TEXT", "llguidance",
         "max_seq_len", "stop_strings", "embedding_bias")  # fmt: skip


@pytest.mark.parametrize(("message", "param", "words"), REFUSALS)
def test_refusals_of_the_engine_speak_of_the_clients_fields(url, triton: FakeTriton, message, param, words) -> None:
    async def script(request):
        yield Refusal("refused", message)

    triton.script = script
    body = {**CHAT, "response_format": {"type": "json_object"}, "max_completion_tokens": 9}
    answer = post(f"{url}/v1/chat/completions", body)
    check(answer, 413 if "tensors have" in message else 400, param, words)
    said = json.loads(answer.body)["error"]["message"]
    assert not any(word in said for word in INNER), said


def test_limits_name_the_field_that_was_given(url: str) -> None:
    for body, words in (
        ({"max_completion_tokens": 4095}, "lower max_completion_tokens or"),
        ({"max_tokens": 4095}, "lower max_tokens or"),
        ({"max_completion_tokens": 5, "min_tokens": 9}, "above max_completion_tokens"),
    ):
        answer = post(f"{url}/v1/chat/completions", {**CHAT, **body})
        assert words in answer.body, answer.body
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"description": "x" * 70_000}}}
    answer = post(f"{url}/v1/chat/completions", {**CHAT, "response_format": schema})
    check(answer, 400, "response_format", "bytes")


def test_embeddings(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="generates text"):
        client.embeddings.create(model="tiny", input="x")
    check(call(url, "POST", "/v1/embeddings", b"{"), 404, None)


def test_best_of_and_its_limits(url: str) -> None:
    for more in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        check(post(f"{url}/v1/completions", {**COMPLETION, **more}), 400, "best_of")
