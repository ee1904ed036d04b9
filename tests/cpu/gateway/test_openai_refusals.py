"""Every request that cannot be served gets OpenAI's error envelope, the right status and the field's name."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from kvforge.common.refusals import GUIDES_FULL, PROMPT, QUEUE_FULL, TOO_LARGE, UNKNOWN_TOKEN, Refusal
from kvforge.gateway.errors import ApiError
from kvforge.gateway.requests.prompts import encode
from kvforge.gateway.requests.token_requests import text_only
from kvforge.runtime.requests.checks import too_many_tokens
from kvforge.runtime.requests.guided_decoding import NEEDS_LLGUIDANCE, gave_up, guide_error
from kvforge.runtime.requests.outputs import NOTHING_LEFT
from kvforge.runtime.sampling.sampler import NOT_FINITE
from kvforge.runtime.text.limits import TextLimits
from kvforge.serving.contract.failures import SHUTTING_DOWN, Failure, failed
from tests.cpu.gateway.fake_triton import FakeTriton, Row
from tests.cpu.gateway.http_calls import Answer, call, post, wait_until
from tests.support.models.text_tokenizers import PANICKING_TEXT, panicking, panicking_decoder

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


def test_what_a_tokenizer_fails_on_is_refused_in_the_name_of_its_field() -> None:
    fails = panicking()
    model: Any = SimpleNamespace(text_limits=TextLimits.of(fails, 512), tokenizer=panicking_decoder(), max_seq_len=512,
                                 manifest=SimpleNamespace(vocab_size=1 << 20))  # fmt: skip
    with pytest.raises(ApiError, match=r"^the model's tokenizer fails on this text; change the text$") as text:
        encode(model, PANICKING_TEXT, True, "messages")
    with pytest.raises(ApiError, match=r"^the model's tokenizer fails on these tokens") as tokens:
        text_only(model, {"tokens": model.tokenizer.encode(PANICKING_TEXT)})
    assert (text.value.param, tokens.value.param) == ("messages", "tokens")


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


BUSY = Refusal("Exceeds maximum queue size, the queue is full: 8 sequences", code=QUEUE_FULL)
WORKERS_BUSY = Refusal("guided decoding is not available: 66 jobs wait for a worker; try again.", code=GUIDES_FULL)
GAVE_UP = "the engine gave up this request"
ENGINE_ERRORS = [
    (failed("refused", Refusal("the deadline of the prompt is odd")), 400, openai.BadRequestError, "is odd"),
    (Failure("refused", "TypeError: 5"), 400, openai.BadRequestError, "cannot be served"),
    (failed("unavailable", BUSY), 429, openai.RateLimitError, "too many requests"),
    (failed("unavailable", WORKERS_BUSY), 429, openai.RateLimitError, "too many new forms"),
    (SHUTTING_DOWN, 503, openai.InternalServerError, "another server or later"),
    (Failure("unavailable", "engine 0x5 is behind"), 503, openai.InternalServerError, "try again later"),
    (failed("unavailable", Refusal("engine 0x5 is behind")), 503, openai.InternalServerError, "try again later"),
    (Failure("lost", "the engine process ended by signal 9"), 503, openai.InternalServerError, "has ended; try again"),
    (Failure("deadline", "its timeout was 3 s"), 504, openai.InternalServerError, "deadline has passed"),
    (Failure("cancelled", "the request was cancelled"), 499, openai.APIStatusError, "was cancelled"),
    (Failure("failed", "the request failed: KeyError 'x'"), 500, openai.InternalServerError, "its log says why"),
    (Failure("failed", GAVE_UP, NOT_FINITE), 500, openai.InternalServerError, "its log says why"),
    (Failure("failed", GAVE_UP, gave_up("at 7").refusal), 400, openai.BadRequestError, "too complex.*simplify"),
    (Failure("failed", GAVE_UP, NOTHING_LEFT), 400, openai.BadRequestError, "leaves no token"),
    (Failure("triton", "Request for unknown model: 'tensorrt_llm' is not found"), 503, openai.InternalServerError,
     "not loaded"),
    (Failure("triton", "Stub process 'tensorrt_llm_0_0' is not healthy."), 503, openai.InternalServerError,
     "not loaded"),
    (Failure("triton", "unexpected shape for input 'seed'"), 500, openai.InternalServerError, "its log says why"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("failure", "status", "kind", "words"), ENGINE_ERRORS)
def test_engine_errors(client, triton: FakeTriton, failure: Failure, status, kind, words, stream: bool) -> None:
    async def script(request):
        yield failure

    triton.script = script
    with pytest.raises(kind, match=words) as found:
        client.completions.create(**COMPLETION, stream=stream)
    assert found.value.status_code == status
    assert ("retry-after" in found.value.response.headers) == (status in (429, 503))


def test_error_in_the_middle_of_a_stream(client: openai.OpenAI, triton: FakeTriton) -> None:
    async def script(request):
        yield Row([100])
        yield Failure("lost", "the engine process ended")

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
            yield Failure("failed", "broken")
        while True:
            await asyncio.sleep(0.01)
            yield Row([101])

    triton.script = script
    with pytest.raises(openai.APIError, match="its log says why"):
        client.completions.create(model="tiny", prompt=["b", "a", "b"])
    wait_until(lambda: all(request.cancelled for request in triton.requests if request.prompt != [100]))


REFUSALS = [
    (Refusal("is -5", "give a whole number of at least 0", "top_k"), "top_k", "is -5; give a whole number"),
    (Refusal("is missing", field="max_tokens"), "max_completion_tokens", "is missing"),
    (Refusal("has 5 numbers a prompt, but the model's vocabulary has 320", field="logit_bias"), "logit_bias", "has 5"),
    (Refusal("has 9 characters together", "give at most 4", "stop"), "stop", "'stop' has 9 characters"),
    (Refusal("is 9, above the 5 tokens to generate", "lower it or raise {max_tokens}", "min_tokens"), "min_tokens",
     "lower it or raise max_completion_tokens"),
    (Refusal("cannot be used", "give token ids", "stop_token_ids"), "stop_token_ids", "give token ids"),
    (guide_error("cannot be used: regex parse error: unclosed group").refusal, "response_format", "unclosed group"),
    (guide_error("cannot be used: the schema holds 900 references", "give at most 500").refusal, "response_format",
     "900 references; give at most 500"),
    (NEEDS_LLGUIDANCE, "response_format", "cannot be used here; leave it out"),
    (too_many_tokens("9", 6).refusal, "messages", "'messages' has 9 tokens"),
    (Refusal("holds token id 999", "use the engine's tokenizer", PROMPT, UNKNOWN_TOKEN), "messages", "token id 999"),
    (Refusal("the request's tensors have 9 bytes", "send less", code=TOO_LARGE, operator="--max-request-bytes"), None,
     "too large"),
    (Refusal("{max_tokens} is in a text of the client's", "keep it"), None, "{max_tokens} is"),
    (Refusal("is no number", "give one", "input_ids"), "messages", "is no number"),
]  # fmt: skip
INNER = ("tensor", "ensemble", "--", "request_output_len", "runtime_", "guided_decoding", "llguidance", "stop_strings",
         "embedding_bias")  # fmt: skip


@pytest.mark.parametrize(("refusal", "param", "words"), REFUSALS)
def test_refusals_of_the_engine_speak_of_the_clients_fields(url, triton: FakeTriton, refusal, param, words) -> None:
    async def script(request):
        yield failed("refused", refusal)

    triton.script = script
    body = {**CHAT, "response_format": {"type": "json_object"}, "max_completion_tokens": 9}
    answer = post(f"{url}/v1/chat/completions", body)
    check(answer, 413 if refusal.code == TOO_LARGE else 400, param, words)
    said = json.loads(answer.body)["error"]["message"]
    assert not any(word in said for word in INNER), said


def test_limits_name_the_field_that_was_given(url: str) -> None:
    for body, words in (
        ({"max_completion_tokens": 4095}, "lower max_completion_tokens or"),
        ({"max_tokens": 4095}, "lower max_tokens or"),
        ({"max_completion_tokens": 5, "min_tokens": 9}, "raise max_completion_tokens"),
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
