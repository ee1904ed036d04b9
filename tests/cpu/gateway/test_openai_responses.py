"""/v1/responses through the official client, over a Triton that is told what to say."""

import json

import openai
import pytest
from pydantic import BaseModel

from kvforge.runtime.requests.guided_decoding import guide_error
from kvforge.serving.contract.failures import Failure, failed
from tests.cpu.gateway.fake_triton import FakeTriton, Row, bytes_of
from tests.cpu.gateway.http_calls import call, post
from tests.cpu.gateway.test_openai_refusals import check
from tests.cpu.gateway.test_openai_tools import CALL, OTHER, prompt_of, say

TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"type": "function", "name": "g", "description": "d", "strict": True, "parameters": None},
]


@pytest.fixture(scope="module")
def url(url_of_template: str) -> str:
    return url_of_template


def test_text(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, 'héllo "you"')
    answer = client.responses.create(
        model="tiny", instructions="be", input="hi", max_output_tokens=50, temperature=0.5, top_p=0.25, user="me",
        metadata={"a": "b"}, store=False,
    )  # fmt: skip
    assert answer.output_text == 'héllo "you"' and answer.status == "completed" and answer.id.startswith("resp_")
    (item,) = answer.output
    assert (item.type, item.role, item.status, item.content[0].annotations) == ("message", "assistant", "completed", [])
    assert (answer.metadata, answer.instructions, answer.max_output_tokens) == ({"a": "b"}, "be", 50)
    assert (answer.temperature, answer.top_p, answer.store, answer.text.format.type) == (0.5, 0.25, False, "text")
    prompt = "[system]be[user]hi[a]"
    num_tokens = len('héllo "you" '.encode())
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), num_tokens)
    assert (
        answer.usage.total_tokens == len(prompt) + num_tokens
        and answer.usage.output_tokens_details.reasoning_tokens == 0
    )
    assert prompt_of(triton) == prompt
    request = triton.requests[0]
    assert (request.value("request_output_len"), request.value("temperature")) == (50, 0.5)


def test_half_a_call_is_not_completed(client: openai.OpenAI, triton: FakeTriton) -> None:
    """A stop string ends it inside its arguments; the limit ends another behind all of them."""
    say(triton, CALL[:42])
    for stream in (False, True):
        answer = client.responses.create(model="tiny", input="hi", tools=TOOLS, stream=stream)
        if stream:
            done = [event for event in answer if event.type in ("response.output_item.done", "response.completed")]
            assert done[0].item.status == "incomplete"
            answer = done[1].response
        assert [(item.status, item.arguments) for item in answer.output] == [("incomplete", '{"c')]
    say(triton, CALL, "length")
    answer = client.responses.create(model="tiny", input="hi", tools=TOOLS)
    assert (answer.status, answer.output[0].status) == ("incomplete", "completed")
    whole_arguments = CALL[: CALL.index('"}') + 2]
    for text in (whole_arguments, f"{CALL}{OTHER[:42]}"):
        say(triton, text)
        answer = client.responses.create(model="tiny", input="hi", tools=TOOLS, parallel_tool_calls=False)
        assert [(item.status, item.arguments) for item in answer.output] == [("completed", '{"city": "Zürich"}')]


def test_usage_of_a_stream_has_the_cached_tokens(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, "hello")
    events = list(client.responses.create(model="tiny", input="hi", stream=True))
    plain = client.responses.create(model="tiny", input="hi")
    assert events[-1].response.usage == plain.usage
    assert plain.usage.input_tokens_details.cached_tokens > 0
    assert all("kv_cache_reused_blocks" in request.outputs for request in triton.requests)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (f'"text": {{"format": {{"type": "text", "x": {nested(3)}}}}}', "text.format.x"),
        (f'"text": {{"format": {{"type": "json_schema", "name": {nested(3)}, "schema": {{}}}}}}', "text.format.name"),
        (f'"tools": [], "tool_choice": {{"type": "function", "name": "f", "x": {nested(3)}}}', "tool_choice.x"),
        ('"text": {"format": {"type": "json_schema", "name": "a", "schema": {"x": 1e999}}}', "too large a number"),
        (f'"text": {{"format": {{"type": "json_schema", "name": "{"a" * 65}", "schema": {{}}}}}}', "at most 64"),
        (f'"text": {{"format": {{"type": "json_schema", "description": "{"a" * 4097}", "schema": {{}}}}}}', "4096"),
        (f'"instructions": "{"a" * 270000}"', "'instructions' must be text of at most"),
        (f'"seed": {"9" * 5000}', "a number in it has too many digits"),
        (f'"seed": {10**30}', "from -9223372036854775808 to 18446744073709551615"),
        ('"text": {"format": 0}', "text.format.type"),
        (f'"x": {nested(2000)}', "nested too deeply"),
    ],
)  # fmt: skip
def test_what_the_answer_would_repeat_is_bounded(url: str, more: str, words: str) -> None:
    body = f'{{"model": "tiny", "input": "hi", {more}}}'.encode()
    answer = call(url, "POST", "/v1/responses", body, {"Content-Type": "application/json"})
    assert answer.status == 400 and words in json.loads(answer.body)["error"]["message"], answer.body


@pytest.mark.parametrize("depth", [900, 940, 960, 980, 2000])
def test_what_is_nested_too_deeply_is_no_failure(url: str, depth: int) -> None:
    form = f'{{"type": "json_schema", "name": "a", "schema": {{"x": {nested(depth)}}}}}'
    body = f'{{"model": "tiny", "input": "hi", "text": {{"format": {form}}}}}'.encode()
    assert call(url, "POST", "/v1/responses", body, {"Content-Type": "application/json"}).status in (200, 400)
    body = f'{{"model": "tiny", "messages": [], "chat_template_kwargs": {{"x": {nested(depth)}}}}}'.encode()
    assert call(url, "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}).status == 400


def test_items(client: openai.OpenAI, triton: FakeTriton) -> None:
    """What an answer's output gives can be sent back."""
    say(triton, f"So: {CALL}{OTHER}")
    given = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}]
    first = client.responses.create(model="tiny", input=given, tools=TOOLS)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    assert [(item.name, item.arguments) for item in first.output[1:]] == [("f", '{"city": "Zürich"}'), ("g", "{}")]
    assert len({item.call_id for item in first.output[1:]}) == 2 and first.output_text == "So:"
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": out}
        for item, out in zip(first.output[1:], ("rain", [{"type": "input_text", "text": "ok"}]), strict=True)
    ]
    client.responses.create(model="tiny", input=[*given, *first.output, *results])
    ids = [item.call_id for item in first.output[1:]]
    assert prompt_of(triton) == (
        f"[user]ab[assistant]So:<tool_call>f:city=Zürich<tool_call>g:[tool]rain{ids[0]}[tool]ok{ids[1]}[a]".encode().decode()
    )


TEXT_EVENTS = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
               "response.output_text.delta", "response.output_text.done", "response.content_part.done",
               "response.output_item.done", "response.completed"]  # fmt: skip


def kinds(events: list) -> list[str]:
    """The types of events, repeated deltas once."""
    found: list[str] = []
    for event in events:
        if not found or found[-1] != event.type or not event.type.endswith("delta"):
            found.append(event.type)
    return found


@pytest.mark.parametrize("text", ["héllo", "日本 😀"])
def test_stream(client: openai.OpenAI, triton: FakeTriton, text: str) -> None:
    say(triton, text)
    events = list(client.responses.create(model="tiny", input="hi", stream=True))
    assert kinds(events) == TEXT_EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == text and len(deltas) > 2
    final = events[-1].response
    assert final.output_text == text and final.usage.output_tokens == len(f"{text} ".encode())
    assert events[0].response.output == [] and events[0].response.status == "in_progress"
    assert {event.item_id for event in deltas} == {final.output[0].id}
    with client.responses.stream(model="tiny", input="hi") as stream:
        assert stream.get_final_response().output_text == text


def test_stream_of_calls(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, f"So: {CALL}\n{OTHER}")
    events = list(client.responses.create(model="tiny", input="hi", tools=TOOLS, stream=True))
    call = ["response.output_item.added", "response.function_call_arguments.delta",
            "response.function_call_arguments.done", "response.output_item.done"]  # fmt: skip
    assert kinds(events) == [*TEXT_EVENTS[:-1], *call, *call, "response.completed"]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.name, event.arguments, event.output_index) for event in done] == [
        ("f", '{"city": "Zürich"}', 1), ("g", "{}", 2),
    ]  # fmt: skip
    with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_forced_calls(client: openai.OpenAI, triton: FakeTriton, choice) -> None:
    say(triton, '{"name": "f", "arguments": {"city": "x"}}')
    answer = client.responses.create(model="tiny", input="hi", tools=TOOLS, tool_choice=choice)
    (item,) = answer.output
    assert (item.type, item.name, item.arguments) == ("function_call", "f", '{"city": "x"}')
    assert (answer.tool_choice if choice == "required" else answer.tool_choice.name) in ("required", "f")


class Person(BaseModel):
    age: int


def test_text_formats(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, '{"age": 5}')
    assert client.responses.parse(model="tiny", input="hi", text_format=Person).output_parsed == Person(age=5)
    assert triton.requests[0].texts("guided_decoding_guide_type") == ["json_schema"]
    assert json.loads(triton.requests[0].texts("guided_decoding_guide")[0])["properties"]["age"]["type"] == "integer"
    client.responses.create(model="tiny", input="hi", text={"format": {"type": "json_object"}})
    assert triton.requests[1].texts("guided_decoding_guide_type") == ["json"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off(client: openai.OpenAI, triton: FakeTriton, stream: bool) -> None:
    for text, kind in (("half an ans", "message"), (CALL[:50], "function_call")):
        triton.script = lambda request, text=text: bytes_of(text, request, "length")
        answer = client.responses.create(model="tiny", input="hi", tools=TOOLS, stream=stream)
        final = list(answer)[-1].response if stream else answer
        assert final.status == "incomplete" and final.incomplete_details.reason == "max_output_tokens"
        assert (final.output[-1].type, final.output[-1].status) == (kind, "incomplete")


def test_an_empty_answer(client: openai.OpenAI, triton: FakeTriton) -> None:
    async def script(request):
        yield Row([2], finish_reason="stop")

    triton.script = script
    assert client.responses.create(model="tiny", input="hi").output[0].content[0].text == ""
    assert kinds(list(client.responses.create(model="tiny", input="hi", stream=True))) == [
        kind for kind in TEXT_EVENTS if not kind.endswith("delta")
    ]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "output_text", "text": "x"}]}]}, "input[0].summary[0]"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "king", "content": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "c"}]}, "input[0].call_id"),
        ({"input": "x" * 4096}, "input"),
        ({"instructions": ["x"]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"colour": "red"}}, "text.colour"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOLS[0], {"type": "telescope"}]}, "tools[1]"),
        ({"tools": [TOOLS[0], {"type": ["web_search"]}]}, "tools[1]"),
        ({"tools": [TOOLS[0], {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"user": "x" * 513}, "user"),
        ({"model": "big"}, "model"),
        ({"messages": []}, "messages"),
    ],
)
def test_refusals(url: str, triton: FakeTriton, more: dict, param: str) -> None:
    answer = post(f"{url}/v1/responses", {"model": "tiny", "input": "hi", **more})
    check(answer, 404 if param == "model" else 400, param)
    assert param == "messages" or "messages" not in answer.body
    assert "completion" not in answer.body and triton.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine(client: openai.OpenAI, triton: FakeTriton, stream: bool) -> None:
    async def refuse(request):
        yield failed("refused", guide_error("cannot be used: it allows no text").refusal)

    async def break_off(request):
        yield Row([100])
        yield Failure("lost", "the engine process ended")

    triton.script = refuse
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError, match=r"'text\.format' cannot be used: it allows no text"):
        client.responses.create(model="tiny", input="hi", text=form, stream=stream)
    triton.script = break_off
    with pytest.raises(openai.APIError, match="has ended"):
        list(client.responses.create(model="tiny", input="hi", stream=stream))
