"""A request to /v1/messages is the chat that it stands for; what it cannot be is refused in Anthropic's form."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from kvforge.gateway.endpoints import Endpoint
from kvforge.gateway.errors import ApiError
from kvforge.gateway.model import ServedModel
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.parsed_request import ParsedRequest
from kvforge.gateway.requests.messages.fields import SAMPLING
from kvforge.gateway.requests.request_reader import RequestReader
from kvforge.manifest import TOKENIZER_DIR
from tests.cpu.gateway.chat_template import TEMPLATE as PLAIN
from tests.cpu.gateway.engine_files import write_engine_files
from tests.cpu.gateway.fake_triton import FakeTriton
from tests.cpu.gateway.http_calls import Answer, call, connect, post, read_to_end
from tests.cpu.gateway.language_templates import TEMPLATES
from tests.support.fuzz.bytes import break_body

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ enable_thinking }}"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning }}|{{ m.content }}{{ m.tool_call_id }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }}{{ c.function | tojson }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}</think>"
)
HELLO = [{"role": "user", "content": "hi"}]
GOOD: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": HELLO}
OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
ODD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x)"}}}
TEXTS = ["a", "é", "😀", "\n", " ", '"', "\\", "{", "<", "[user]", "</think>", "Error: "]


@pytest.fixture(scope="module")
def make_reader(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RequestReader]:
    engine = write_engine_files(tmp_path_factory.mktemp("engine") / "tiny")

    def make(template: str) -> RequestReader:
        file: Path = tmp_path_factory.mktemp("template") / "template.jinja"
        file.write_text(template)
        options = GatewayOptions(engine=engine, chat_template=file, tool_call_format="hermes")
        return RequestReader(ServedModel.load(options), options)

    return make


@pytest.fixture(scope="module")
def reader(make_reader: Callable[[str], RequestReader]) -> RequestReader:
    return make_reader(TEMPLATE)


def read(reader: RequestReader, body: dict[str, Any], endpoint: Endpoint) -> ParsedRequest:
    return reader.read(json.dumps(body).encode(), endpoint)


def text(rng: random.Random) -> str:
    return "".join(rng.choices(TEXTS, k=rng.randrange(1, 6)))


def both_texts(rng: random.Random) -> tuple[Any, str]:
    """A content as Anthropic's blocks or text, and as text."""
    if rng.random() < 0.5:
        one = text(rng)
        return one, one
    parts = [text(rng) for _ in range(rng.randrange(1, 4))]
    hint = {"cache_control": {"type": "ephemeral"}}
    return [{"type": "text", "text": part, **(hint if rng.random() < 0.3 else {})} for part in parts], "".join(parts)


def value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(6 if depth else 4)
    if kind == 4:
        return [value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 5:
        return {text(rng): value(rng, depth - 1) for _ in range(rng.randrange(3))}
    return (text(rng), rng.randrange(-99, 99), rng.random() < 0.5, None)[kind]


def random_pair(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request to /v1/messages, and one to /v1/chat/completions, written beside each other."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for _ in range(rng.randrange(4)):
        content, plain = both_texts(rng)
        ours.append({"role": "user", "content": content})
        theirs.append({"role": "user", "content": plain})
        blocks: list[dict[str, Any]] = []
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if rng.random() < 0.5:
            message["reasoning_content"] = text(rng)
            blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": text(rng)})
        if rng.random() < 0.2:
            blocks.append({"type": "redacted_thinking", "data": "x"})
        if rng.random() < 0.8:
            message["content"] = text(rng)
            blocks.append({"type": "text", "text": message["content"]})
        calls = [(f"toolu_{rng.randrange(99)}", rng.choice("fg"), {"a": value(rng)}) for _ in range(rng.randrange(3))]
        blocks += [{"type": "tool_use", "id": id, "name": name, "input": given} for id, name, given in calls]
        if calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
                for id, name, given in calls
            ]
        is_plain = len(blocks) == 1 and blocks[0]["type"] == "text" and rng.random() < 0.5
        ours.append({"role": "assistant", "content": message["content"] if is_plain else blocks})
        theirs.append(message)
        results = []
        for id, _, _ in calls:
            content, plain = both_texts(rng)
            failed = rng.random() < 0.3
            results.append({"type": "tool_result", "tool_use_id": id, "content": content, "is_error": failed})
            theirs.append({"role": "tool", "tool_call_id": id, "content": f"Error: {plain}" if failed else plain})
        if calls and rng.random() < 0.5:
            results.append({"type": "text", "text": text(rng)})
            theirs.append({"role": "user", "content": results[-1]["text"]})
        if calls:
            ours.append({"role": "user", "content": results})
    content, plain = both_texts(rng)
    ours.append({"role": "user", "content": content})
    theirs.append({"role": "user", "content": plain})
    body: dict[str, Any] = {"messages": ours, "max_tokens": rng.randrange(1, 99), "seed": rng.randrange(99)}
    chat: dict[str, Any] = {"messages": theirs, "max_tokens": body["max_tokens"], "seed": body["seed"]}
    if rng.random() < 0.5:
        body["system"], plain = both_texts(rng)
        theirs.insert(0, {"role": "system", "content": plain})
    if rng.random() < 0.5:
        describe = {"description": text(rng)} if rng.random() < 0.5 else {}
        body["tools"] = [{"name": name, **describe, "input_schema": OBJECT} for name in "fg"]
        chat["tools"] = [
            {"type": "function", "function": {"name": name, **describe, "parameters": OBJECT}} for name in "fg"
        ]
        single = rng.random() < 0.3
        named = {"type": "function", "function": {"name": "g"}}
        kind = rng.choice(["auto", "any", "none", "tool"])
        body["tool_choice"] = {"type": kind, **({"name": "g"} if kind == "tool" else {})}
        body["tool_choice"] |= {"disable_parallel_tool_use": True} if single else {}
        chat["tool_choice"] = {"any": "required", "tool": named}.get(kind, kind)
        chat["parallel_tool_calls"] = not single
    if rng.random() < 0.3:
        body["thinking"] = rng.choice([{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
        chat["chat_template_kwargs"] = {"enable_thinking": True}
    elif rng.random() < 0.3:
        body["thinking"] = {"type": "disabled"}
        chat["chat_template_kwargs"] = {"enable_thinking": False}
    if rng.random() < 0.3:
        body["stop_sequences"] = chat["stop"] = [text(rng)]
    if rng.random() < 0.3:
        body["stream"] = chat["stream"] = True
        chat["stream_options"] = {"include_usage": True}
    for name, number in (("temperature", 0.5), ("top_p", 0.25), ("top_k", 3)):
        if rng.random() < 0.3:
            body[name] = chat[name] = number
    return body, chat


@pytest.mark.parametrize("seed", range(150))
def test_it_is_the_chat_that_it_stands_for(reader: RequestReader, seed: int) -> None:
    """Prompt and tensors are the same, and so is how the answer is read."""
    body, chat = random_pair(random.Random(seed))
    ours, theirs = read(reader, body, Endpoint.MESSAGES), read(reader, chat, Endpoint.CHAT)
    assert ours.prompts == theirs.prompts
    assert ours == dataclasses.replace(theirs, names=ours.names, shown=ours.shown)
    counted = {name: body[name] for name in ("messages", "system", "tools", "tool_choice", "thinking") if name in body}
    assert read(reader, counted, Endpoint.COUNT_TOKENS).num_prompt_tokens == theirs.num_prompt_tokens


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_is_the_same_chat_to_the_templates_of_models(make_reader, name: str) -> None:
    of_model = make_reader(TEMPLATES[name])
    for seed in range(20):
        pair = random_pair(random.Random(seed))
        body, chat = (
            {name: each[name] for name in ("messages", "max_tokens", "system") if name in each} for each in pair
        )
        assert read(of_model, body, Endpoint.MESSAGES).prompts == read(of_model, chat, Endpoint.CHAT).prompts


def test_what_comes_in_another_order_keeps_it(reader: RequestReader) -> None:
    blocks = [
        {"type": "text", "text": "A"}, {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        {"type": "thinking", "thinking": "B", "signature": "s"}, {"type": "thinking", "thinking": "C", "signature": ""},
        {"type": "tool_use", "id": "2", "name": "f", "input": {}}, {"type": "text", "text": "D"},
    ]  # fmt: skip
    results = [
        {"type": "text", "text": "E"},
        {"type": "tool_result", "tool_use_id": "1"},
        {"type": "text", "text": "F"},
    ]
    messages = [
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
        {"role": "system", "content": "G"},
        {"role": "user", "content": []},
    ]
    prompt = read(reader, {"messages": messages, "max_tokens": 1}, Endpoint.MESSAGES).prompts[0]
    shown, call = bytes(token - 3 for token in memoryview(prompt).cast("i")).decode(), '{"name": "f", "arguments": {}}'
    assert shown == (
        f"[assistant]|A<tool_call>1{call}[assistant]B\nC|<tool_call>2{call}"
        "[assistant]|D[user]|E[tool]|1[user]|F[system]|G[user]|[a]</think>"
    )


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('too late') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}{% endfor %}[a]"
)
BODY_OF_AN_AGENT: dict[str, Any] = {
    "model": "tiny", "max_tokens": 32000, "stream": True, "thinking": {"type": "adaptive"},
    "metadata": {"user_id": '{"device_id": "x"}'}, "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "B"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "C"}, {"type": "text", "text": "D"}]},
        {"role": "system", "content": "E"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "kvforge"}, CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "F", "is_error": False}]},
        {"role": "system", "content": "G"},
    ],
}  # fmt: skip
"""As Claude Code 2.1 sends it, with texts of the system between the messages."""


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (STRICT, "[system]AB[user]CD\n\nE[assistant](f)[tool]F[user]G[a]"),
        (
            STRICT.replace("and not loop.first", "and false"),
            "[system]AB[user]CD[system]E[assistant](f)[tool]F[system]G[a]",
        ),
    ],
)
def test_later_texts_of_the_system(make_reader, template: str, prompt: str) -> None:
    """A template that takes none gets them as the user's."""
    asked = read(make_reader(template), BODY_OF_AN_AGENT, Endpoint.MESSAGES)
    assert bytes(token - 3 for token in memoryview(asked.prompts[0]).cast("i")).decode() == prompt


@pytest.mark.parametrize(
    ("template", "thinking", "words"),
    [
        (PLAIN, {"type": "disabled"}, None),
        (PLAIN, {"type": "enabled", "budget_tokens": 5}, None),
        (PLAIN, {"type": "adaptive"}, None),
        (PLAIN + "{# </think> #}", {"type": "enabled", "budget_tokens": 5}, None),
        (PLAIN + "{# </think> #}", {"type": "disabled"}, "'thinking.type' cannot be disabled"),
        (PLAIN + "{{ thinking }}", {"type": "disabled"}, None),
    ],
)
def test_thinking_that_the_template_does_not_know(
    make_reader, template: str, thinking: dict, words: str | None
) -> None:
    """A model that does not think keeps to every budget; one that always does cannot be told not to."""
    of_model, body = make_reader(template), {**GOOD, "thinking": thinking}
    if words is None:
        asked = read(of_model, body, Endpoint.MESSAGES)
        assert asked.num_prompt_tokens > 0
    else:
        with pytest.raises(ApiError, match=words):
            read(of_model, body, Endpoint.MESSAGES)


def test_a_budget_is_kept_where_that_is_possible(tmp_path: Path) -> None:
    """As a chat's is: the end of reasoning is one token."""
    engine, template = write_engine_files(tmp_path / "tiny"), tmp_path / "template.jinja"
    template.write_text(TEMPLATE.replace("</think>", "{# </think> #}"))
    file = str(engine / TOKENIZER_DIR / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "</think>")])
    tokenizer.save(file)
    options = GatewayOptions(engine=engine, chat_template=template, tool_call_format="hermes")
    reader = RequestReader(ServedModel.load(options), options)
    for more in ({}, tool()):
        body = {**GOOD, "seed": 1, "thinking": {"type": "enabled", "budget_tokens": 7}, **more}
        chat = {**GOOD, "seed": 1, "thinking_token_budget": 7, "chat_template_kwargs": {"enable_thinking": True}}
        if more:
            function = {"name": "f", "parameters": OBJECT}
            chat |= {"tools": [{"type": "function", "function": function}]}
        ours, theirs = read(reader, body, Endpoint.MESSAGES), read(reader, chat, Endpoint.CHAT)
        assert ours == dataclasses.replace(theirs, names=ours.names, shown=ours.shown)
        without = read(reader, {**body, "thinking": {"type": "adaptive"}}, Endpoint.MESSAGES)
        assert without.template != ours.template and without.prompts == ours.prompts


def test_the_usual_effort_is_none_at_all(make_reader) -> None:
    of_model = make_reader(PLAIN.replace("{{ reasoning_effort }}", ""))
    usual = {**GOOD, "output_config": {"effort": "high"}}
    assert read(of_model, usual, Endpoint.MESSAGES).prompts == read(of_model, GOOD, Endpoint.MESSAGES).prompts
    with pytest.raises(ApiError, match=r"'output_config\.effort' is not read by the model's chat template"):
        read(of_model, {**GOOD, "output_config": {"effort": "low"}}, Endpoint.MESSAGES)


@pytest.fixture(scope="module")
def url(start_shared: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    return start_shared(chat_template=file, tool_call_format="hermes")


def check(answer: Answer, status: int, kind: str, words: str = "") -> None:
    """Anthropic's form of an error, in one sentence."""
    assert answer.status == status, answer.body
    body = json.loads(answer.body)
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["error"].keys() - {"details"} == {"type", "message"} and body["error"]["type"] == kind
    assert words in body["error"]["message"] and "\n" not in body["error"]["message"], body
    assert len(body["error"]["message"]) < 700
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(blocks)}, *HELLO]}


def tool(**more: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": OBJECT, **more}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "'max_tokens' is missing"),
    ({"max_tokens": 0}, "'max_tokens' must be a whole number from 1"),
    ({"max_tokens": "9"}, "'max_tokens'"),
    ({"max_token": 9}, "Unknown field 'max_token'"),
    ({"messages": None}, "'messages' must be a list of at least one message"),
    ({"messages": []}, "'messages' must be a list"),
    ({"messages": ["hi"]}, "'messages[0]' must be an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "'messages[0].role' must be one of user, assistant, system"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "'messages[0].role'"),
    ({"messages": [{"role": "user", "content": 5}]}, "'messages[0].content' must be text or a list of blocks"),
    ({"messages": [{"role": "user"}]}, "'messages[0].content'"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "'messages[0].name' is not known"),
    ({"messages": [{"role": "user", "content": "x" * 4096}]}, "prompt is too long: "),
    (user("x"), "'messages[0].content[0]' is no block"),
    (user({"type": 5}), "'messages[0].content[0]' is no block"),
    (user({"type": "text"}), "'messages[0].content[0].text' must be text"),
    (user({"type": "text", "text": "x", "colour": "red"}), "'messages[0].content[0].colour' is not known"),
    (user(IMAGE), "'messages[0].content[0]' is a block of type 'image'; here the model reads only text, tool_result"),
    (user({"type": "document", "source": {}}), "of type 'document'"),
    (user({"type": "search_result", "content": []}), "of type 'search_result'"),
    (user({"type": "container_upload", "file_id": "x"}), "of type 'container_upload'"),
    (user(CALL), "of type 'tool_use'"),
    (user({"type": "tool_result", "content": "x"}), "'messages[0].content[0].tool_use_id' must be text"),
    (user({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}), "'messages[0].content[0].content[0]' is a"),
    (user({"type": "tool_result", "tool_use_id": "a", "content": 5}), "'messages[0].content[0].content'"),
    (user({"type": "tool_result", "tool_use_id": "a", "is_error": "yes"}), "is_error' must be true or false"),
    (assistant({"type": "tool_result", "tool_use_id": "a"}), "of type 'tool_result'"),
    (assistant({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}), "'server_tool_use'"),
    (assistant({"type": "web_search_tool_result", "tool_use_id": "a", "content": []}), "'web_search_tool_result'"),
    (assistant({"type": "thinking", "signature": "x"}), "content[0].thinking' must be text"),
    (assistant({"type": "tool_use", "id": "a", "name": "f"}), "content[0].input' must be an object"),
    (assistant({"type": "tool_use", "id": 5, "name": "f", "input": {}}), "content[0].id' must be text"),
    (assistant({"type": "tool_use", "id": "a", "name": None, "input": {}}), "content[0].name' must be text"),
    ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}]}, "'messages' end with a call of a tool"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "So"}], **tool(), "tool_choice": {"type": "any"}},
     "'tool_choice' forces a call"),
    ({"system": 5}, "'system' must be text or a list of blocks"),
    ({"system": [IMAGE]}, "'system[0]' is a block of type 'image'"),
    ({"stop_sequences": "x"}, "'stop_sequences' must be a list of texts"),
    ({"stop_sequences": ["x"] * 17}, "'stop_sequences' holds 17 strings"),
    ({"stop_sequences": [5]}, "'stop_sequences'"),
    ({"stop_sequences": [""]}, "'stop_sequences'"),
    ({"stop": ["x"]}, "'stop' is not supported: give stop_sequences"),
    ({"temperature": -1}, "'temperature'"),
    ({"top_p": 2}, "'top_p'"),
    ({"top_k": "x"}, "'top_k'"),
    ({"stream": "yes"}, "'stream' must be true or false"),
    ({"tools": {}}, "'tools' must be a list of tools"),
    ({"tools": ["f"]}, "'tools[0]' must be"),
    ({"tools": [{"name": "f"}]}, "'tools[0].input_schema' must be a JSON schema"),
    (tool(name="a b"), "'tools[0].name' must be 1 to 128 letters"),
    (tool(input_schema={"type": "string"}), "'tools[0].input_schema' must be a JSON schema of type object"),
    (tool(strict=True, input_schema=ODD), "'tools[0].input_schema' belongs to 'f'"),
    (tool(strict="yes"), "'tools[0].strict'"),
    (tool(description=5), "'tools[0].description' must be text"),
    (tool(colour="red"), "'tools[0].colour' is not known"),
    (tool(defer_loading=True), "'tools[0].defer_loading' is not supported"),
    (tool(input_examples=[{"a": "x"}]), "'tools[0].input_examples' is not supported"),
    (tool(allowed_callers=["code_execution_20250825"]), "'tools[0].allowed_callers' is not supported"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'tools[0]' is of type 'web_search_20250305'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'tools[0]' is of type 'bash_20250124'"),
    ({"tools": [{"type": [1], "name": "f"}]}, "'tools[0]' is of type '[1]'"),
    ({"tools": [*tool()["tools"], *tool()["tools"]]}, "'tools[1].name' is 'f' a second time"),
    ({"tool_choice": {"type": "any"}}, "'tool_choice' needs tools"),
    ({**tool(), "tool_choice": "auto"}, "'tool_choice' must be"),
    ({**tool(), "tool_choice": {"type": ["auto"]}}, "'tool_choice' must be"),
    ({**tool(), "tool_choice": {"type": "tool"}}, "'tool_choice' must be"),
    ({**tool(), "tool_choice": {"type": "tool", "name": "g"}}, "'tool_choice' names 'g', which is none of the tools"),
    ({**tool(), "tool_choice": {"type": "any", "name": "f"}}, "'tool_choice.name' is not known"),
    ({**tool(), "tool_choice": {"type": "auto", "disable_parallel_tool_use": "no"}}, "disable_parallel_tool_use'"),
    ({"thinking": "enabled"}, "'thinking.type' must be one of"),
    ({"thinking": {"type": "between_tools"}}, "'thinking.type' must be one of enabled, adaptive, disabled"),
    ({"thinking": {"type": "enabled"}}, "'thinking.budget_tokens' is missing"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "'thinking.budget_tokens' must be a whole number"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "'thinking.budget_tokens' is not known"),
    ({"thinking": {"type": "adaptive", "display": "loud"}}, "'thinking.display' must be"),
    ({"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": True}}, "thinking says already"),
    ({"thinking": {"type": "adaptive"}, "chat_template_kwargs": []}, "'chat_template_kwargs' must be an object"),
    ({"chat_template_kwargs": {"colour": "red"}}, "'chat_template_kwargs.colour' is not read"),
    ({"output_config": []}, "'output_config' must be an object"),
    ({"output_config": {"effort": "low"}}, "'output_config.effort' is not read by the model's chat template"),
    ({"output_config": {"format": {"type": "xml"}}}, "'output_config.format' must be"),
    ({"output_config": {"colour": "red"}}, "'output_config.colour' is not known"),
    ({"mcp_servers": [{"type": "url", "url": "x", "name": "x"}]}, "'mcp_servers' is not supported"),
    ({"container": {"skills": []}}, "'container' is not supported"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "'context_management' is not"),
    ({"thread": {"type": "create"}}, "'thread' is not supported: conversations are not stored"),
    ({"speed": "fast"}, "'speed' is not supported"),
    ({"inference_geo": "eu"}, "'inference_geo' is not supported"),
    ({"fallbacks": [{"model": "x"}]}, "'fallbacks' is not supported"),
    ({"seed": 2**70}, "'seed'"),
    ({"system": "\ud800"}, "half a character"),
    ({"model": 5}, "'model' must be a name of the model"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "words"), REFUSALS, ids=[words for _, words in REFUSALS])
def test_refusals(url: str, triton: FakeTriton, more: dict[str, Any], words: str) -> None:
    check(post(f"{url}/v1/messages", {**GOOD, **more}), 400, "invalid_request_error", words)
    assert triton.requests == []


def test_a_code_tells_programs_why(url: str) -> None:
    """Anthropic's client goes on without `thread` where it is told so."""
    answer = post(f"{url}/v1/messages", {**GOOD, "thread": {"type": "create"}})
    assert json.loads(answer.body)["error"]["details"] == {"error_code": "thread_unsupported_request"}


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


HOSTILE = {
    "nothing": b"", "no JSON": b"{", "a list": b"[]", "a text": b'"x"', "not UTF-8": b'{"model": "\xff"}',
    "not a number": b'{"max_tokens": NaN}', "infinite": b'{"temperature": 1e999}',
    "a long number": b'{"max_tokens": ' + b"9" * 5000 + b"}", "deep": b'{"messages": ' + nested(5000) + b"}",
    "deep system": b'{"max_tokens": 1, "system": ' + nested(900) + b"}",
    "deep input": b'{"max_tokens": 1, "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", '
                  b'"name": "f", "input": {"x": ' + nested(960) + b"}}]}]}",
    "deep schema": b'{"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f", '
                   b'"input_schema": {"type": "object", "properties": {"x": ' + b'{"items":' * 900 + b"{}" + b"}" * 902
                   + b"]}",
    "half a character": b'{"max_tokens": 1, "messages": [{"role": "user", "content": "\\ud800"}]}',
    "NUL": b"\0" * 100, "two objects": b"{}{}", "UTF-16": "{}".encode("utf-16"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_bodies_that_are_none(url: str, triton: FakeTriton, name: str, path: str) -> None:
    answer = call(url, "POST", path, HOSTILE[name], {"Content-Type": "application/json"})
    check(answer, 400, "invalid_request_error")
    assert triton.requests == []


VALUES: list[Any] = [
    None, True, 0, -1, 2**31, 2**70, 0.5, "", "x", "\u0000", "x" * 5000, [], [1], [None], [[]], {}, {"type": "text"},
    {"type": []}, [{"type": "text", "text": 5}], [{"type": "text", "text": "x"}], [{}], {"type": "enabled"},
    {"a": {"b": 1}},
]  # fmt: skip
PLACES = ["messages", "system", "max_tokens", "tools", "tool_choice", "thinking", "output_config", "stop_sequences",
          "metadata", "stream", "model", "chat_template_kwargs", "context_management", *SAMPLING]  # fmt: skip


def broken(rng: random.Random) -> bytes:
    """A conversation with something odd anywhere in it."""
    body, _ = random_pair(rng)
    body["model"] = "tiny"
    for _ in range(rng.randrange(1, 4)):
        if rng.random() < 0.5:
            body[rng.choice(PLACES)] = rng.choice(VALUES)
            continue
        messages = body.get("messages")
        message = rng.choice(messages) if isinstance(messages, list) and messages else None
        blocks = message.get("content") if isinstance(message, dict) else None
        place = rng.choice(blocks) if isinstance(blocks, list) and blocks and rng.random() < 0.7 else message
        if isinstance(place, dict):
            place[rng.choice(["type", "text", "role", "content", "input", "id", "name", "tool_use_id", "is_error"])] = (
                rng.choice(VALUES)
            )
    data = json.dumps(body).encode()
    return break_body(rng, data) if rng.random() < 0.3 else data


@pytest.mark.parametrize("seed", range(30))
def test_odd_bodies_are_served_or_refused(url: str, triton: FakeTriton, seed: int) -> None:
    """Ten a seed, at either path."""
    rng = random.Random(seed)
    for _ in range(10):
        data = broken(rng)
        path = rng.choice(["/v1/messages", "/v1/messages/count_tokens"])
        answer = call(url, "POST", path, data, {"Content-Type": "application/json"})
        if answer.status != 200:
            assert answer.status in (400, 404), (data, answer.body)
            check(answer, answer.status, "not_found_error" if answer.status == 404 else "invalid_request_error")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_other_methods(url: str, method: str) -> None:
    check(call(url, method, "/v1/messages"), 405, "invalid_request_error", "this method is not allowed here")


def test_a_body_that_does_not_arrive(start: Callable[..., str]) -> None:
    with connect(start(body_timeout=0.3)) as half:
        half.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        head, _, body = read_to_end(half).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and json.loads(body)["error"]["type"] == "timeout_error"


def test_without_a_template(start: Callable[..., str], triton: FakeTriton, tmp_path: Path) -> None:
    engine = write_engine_files(tmp_path / "tiny")
    next(engine.glob("*/chat_template.jinja")).unlink()
    answer = post(f"{start(engine=engine)}/v1/messages", GOOD)
    check(answer, 400, "invalid_request_error", "has no chat template: use /v1/completions, or start the server with")


def test_other_paths_speak_as_the_client_does(url: str) -> None:
    missing = call(url, "GET", "/v1/models/x", headers={"anthropic-version": "2023-06-01"})
    check(missing, 404, "not_found_error", "does not exist")
    assert json.loads(call(url, "GET", "/v1/models/x").body)["error"]["code"] == "model_not_found"


def test_requests_are_counted(url: str, triton: FakeTriton) -> None:
    """As those of the other endpoints are, and by the limits of these (test_messages_client.py)."""
    post(f"{url}/v1/messages", GOOD)
    post(f"{url}/v1/messages/count_tokens", {"messages": HELLO})
    lines = call(url, "GET", "/metrics").body.splitlines()
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert any(line.startswith(f'kvforge_gateway_requests_total{{path="{path}",status="200"}}') for line in lines)
