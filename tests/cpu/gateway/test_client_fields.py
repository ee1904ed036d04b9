"""What clients send beside what they ask for: given its meaning, left out and said so, or without effect."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from kvforge.common.errors import RequestError
from kvforge.gateway.answers.left_header import LEFT_TOOLS_HEADER
from kvforge.tokenization.past_reasoning import past_reasoning
from tests.cpu.gateway.fake_triton import FakeTriton
from tests.cpu.gateway.http_calls import WAIT_S, post
from tests.cpu.gateway.test_openai_tools import CALL, HELLO, TOOLS, prompt_of, say

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<<{{ m.reasoning_content }}>>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


class City(BaseModel):
    city: str


@pytest.fixture(scope="module")
def url(start_shared: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    template: Path = tmp_path_factory.mktemp("clients") / "template.jinja"
    template.write_text(TEMPLATE)
    return start_shared(chat_template=template, tool_call_format="hermes")


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def written(url: str, triton: FakeTriton, message: dict[str, Any], **more: Any) -> str:
    """What the template makes of a message between two others, and of the rest of a request."""
    answer = post(f"{url}/v1/chat/completions", {"messages": [*HELLO, message, *HELLO], **more})
    assert answer.status == 200, answer.body
    return prompt_of(triton).removeprefix("[user]hi").removesuffix("[user]hi[a]")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None}, "[assistant]"),
        ({"role": "assistant"}, "[assistant]"),
        ({"role": "assistant", "content": [], "tool_calls": []}, "[assistant]"),
        ({"role": "assistant", "content": None, "reasoning_content": "so"}, "[assistant]<<so>>"),
        ({"role": "assistant", "content": None, "refusal": "no"}, "[assistant]no"),
        ({"role": "assistant", "content": "", "refusal": "no"}, "[assistant]no"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "[assistant]no"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]}, "[user]ab"),
        (
            {
                "role": "assistant",
                "content": "a",
                "reasoning_details": [{"text": "x"}, {"summary": "y"}, {"data": "="}],
            },
            "[assistant]<<xy>>a",
        ),
        ({"role": "assistant", "content": "a", "reasoning_details": []}, "[assistant]a"),
        (
            {"role": "assistant", "content": "a", "thinking_blocks": [{"thinking": "x", "signature": "s"}]},
            "[assistant]<<x>>a",
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "x", "thinking_blocks": [{"thinking": "long"}]},
            "[assistant]<<x>>a",
        ),
        ({"role": "user", "content": "a", "id": "m1", "cache_control": {"type": "ephemeral"}}, "[user]a"),
        ({"role": "assistant", "content": "a", "provider_specific_fields": {"x": 1}, "parsed": None}, "[assistant]a"),
        ({"role": "assistant", "content": "a", "annotations": [{"type": "url_citation"}]}, "[assistant]a"),
    ],
)
def test_messages(url: str, triton: FakeTriton, message: dict[str, Any], text: str) -> None:
    assert written(url, triton, message) == text


def test_a_message_that_the_client_has_parsed_comes_back(client: openai.OpenAI, triton: FakeTriton) -> None:
    """The official client sends `parsed` and `parsed_arguments` along, and the reasoning under both names."""
    say(triton, CALL.replace("f", "City"))
    tools = [openai.pydantic_function_tool(City)]
    message = client.chat.completions.parse(model="tiny", messages=HELLO, tools=tools).choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == City(city="Zürich")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "sun"}]}
    client.chat.completions.create(model="tiny", messages=[*HELLO, message, result], tools=tools)
    assert prompt_of(triton).endswith('{"city": "Zürich"}}</tool_call>[tool]sun[a]')
    say(triton, '{"city": "x"}')
    message = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=City).choices[0].message
    client.chat.completions.create(model="tiny", messages=[*HELLO, message, *HELLO])
    assert prompt_of(triton) == '[user]hi[assistant]{"city": "x"}[user]hi[a]'


def test_no_template_sees_a_hint_on_a_tool(url: str, triton: FakeTriton) -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    plain = {"type": "function", "function": {"name": "f"}}
    hinted = {"type": "function", "function": {"name": "f", **hint}, **hint}
    prompts = [written(url, triton, HELLO[0], tools=[tool]) for tool in (plain, hinted)]
    assert prompts[0] == prompts[1] and '"name": "f"' in prompts[0]


@pytest.mark.parametrize(
    "more",
    [
        {"store": True, "metadata": {"a": "b"}},
        {"max_tokens": 9, "max_completion_tokens": 9},
        {"top_logprobs": 0},
        {"cache_prompt": True, "include_reasoning": True},
        {"modalities": ["text"], "prediction": {"type": "content", "content": "x"}, "service_tier": "flex"},
    ],
)
def test_what_changes_no_answer_is_accepted(url: str, triton: FakeTriton, more: dict[str, Any]) -> None:
    assert post(f"{url}/v1/chat/completions", {"messages": HELLO, **more}).status == 200
    assert triton.requests[0].outputs and prompt_of(triton) == "[user]hi[a]"


def test_two_maxima_that_differ(url: str) -> None:
    answer = post(f"{url}/v1/chat/completions", {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 8})
    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_form_of_texts_is_nothing_to_a_forced_call(client: openai.OpenAI, triton: FakeTriton, choice: Any) -> None:
    """instructor asks for both; OpenAI makes the call."""
    say(triton, '{"name": "f", "arguments": {"city": "x"}}')
    found = client.chat.completions.create(
        model="tiny", messages=HELLO, tools=TOOLS, tool_choice=choice, response_format={"type": "json_object"}
    )
    assert found.choices[0].message.tool_calls[0].function.arguments == '{"city": "x"}'
    assert "city" in triton.requests[0].texts("guided_decoding_guide")[0]


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
@pytest.mark.parametrize("usage", [True, False])
def test_counts_with_every_event(url: str, triton: FakeTriton, endpoint: str, usage: bool) -> None:
    """As vLLM has it: only with `include_usage`."""
    options = {"include_usage": usage, "continuous_usage_stats": True}
    asked = {"messages": HELLO} if endpoint.startswith("chat") else {"prompt": "[user]hi[a]"}
    answer = post(f"{url}/v1/{endpoint}", {**asked, "stream": True, "stream_options": options})
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith("data: {")]
    if not usage:
        assert not any("usage" in event for event in events)
        return
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and {1, 2, 3, 4, 5} <= {*counts} and counts[-1] == 5
    assert {event["usage"]["prompt_tokens"] for event in events} == {len("[user]hi[a]")}
    assert events[-1]["choices"] == [] and all(event["choices"] for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_other_servers_tools_beside_functions_are_left_out(url: str, triton: FakeTriton, stream: bool) -> None:
    """Codex brings them to every server; the answer says which the model was not told of."""
    others = [{"type": "web_search", "external_web_access": False}, {"type": "namespace", "name": "n", "tools": []}]
    say(triton, CALL)
    body = {"input": "hi", "tools": [others[0], FLAT, *others], "tool_choice": "auto", "stream": stream}
    answer = post(f"{url}/v1/responses", body)
    assert answer.status == 200 and json.loads(answer.headers[LEFT_TOOLS_HEADER]) == ["namespace", "web_search"]
    last = json.loads(answer.body.splitlines()[-2][6:])["response"] if stream else json.loads(answer.body)
    assert last["tools"] == [FLAT] and last["output"][0]["name"] == "f"
    assert "web_search" not in prompt_of(triton)
    assert LEFT_TOOLS_HEADER not in post(f"{url}/v1/responses", {**body, "tools": [FLAT]}).headers


def test_responses_say_what_they_have(url: str, triton: FakeTriton) -> None:
    body = {
        "input": "hi", "store": True, "truncation": "auto", "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"}, "client_metadata": {"a": "b"}, "max_tool_calls": 3,
    }  # fmt: skip
    answer = json.loads(post(f"{url}/v1/responses", body).body)
    assert (answer["store"], answer["truncation"], answer["reasoning"]["summary"]) == (False, "disabled", None)


def test_what_carries_no_reasoning() -> None:
    assert past_reasoning({"content": "x", "reasoning_details": [{"type": "reasoning.encrypted", "data": "="}]}) is None
    assert past_reasoning({"reasoning": None, "reasoning_content": ""}) == ""
    for message in ({"reasoning": 5}, {"reasoning_details": {}}, {"thinking_blocks": ["x"]}):
        with pytest.raises(RequestError):
            past_reasoning(message)
