"""Every field of every endpoint, and every member of an object in one: two values give different prompts, tensors or
answers; or it is on a list of those without effect, with the reason; or it is refused."""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from kvforge.gateway.endpoints import Endpoint
from kvforge.gateway.errors import ApiError
from kvforge.gateway.http import openapi
from kvforge.gateway.model import ServedModel
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.requests import functions, guides, request_fields, responses_request, token_requests
from kvforge.gateway.requests.field_descriptions import DESCRIPTIONS
from kvforge.gateway.requests.messages import fields as messages
from kvforge.gateway.requests.request_reader import RequestReader
from kvforge.manifest import TOKENIZER_DIR
from kvforge.tokenization import conversation
from tests.cpu.gateway.engine_files import write_engine_files

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ reasoning_effort }}{{ colour }}"
    "{{ enable_thinking }}{{ thinking_budget }}"
    "{% for m in messages %}[{{ m.role }}{{ m.name }}]{{ m.reasoning }}|{{ m.content }}{{ m.tool_call_id }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }}{{ c.function | tojson }}{% endfor %}"
    ".{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
BASES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.COMPLETIONS: {"prompt": "x", "seed": 1},
    Endpoint.CHAT: {"messages": [{"role": "user", "content": "x"}], "seed": 1},
    Endpoint.RESPONSES: {"input": "x", "seed": 1},
    Endpoint.MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "seed": 1},
    Endpoint.COUNT_TOKENS: {"messages": [{"role": "user", "content": "x"}]},
    Endpoint.TOKENIZE: {"prompt": "x"},
    Endpoint.DETOKENIZE: {"tokens": [5]},
}
OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
OTHER = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": OBJECT}}
FLAT = {"type": "function", "name": "f", "parameters": OBJECT}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": OBJECT, "end": "</f>"}]}
PARTS = [{"type": "text", "text": "x"}]


@dataclass(frozen=True)
class Pair:
    """Two values of a field, and what else the request says."""

    one: Any
    other: Any
    more: Mapping[str, Any] = field(default_factory=dict)


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": value}}


SAMPLING = {
    "temperature": Pair(0.5, 0.25), "top_p": Pair(0.5, 0.25), "top_k": Pair(1, 2), "min_p": Pair(0.5, 0.25),
    "min_tokens": Pair(1, 2, {"max_tokens": 8}), "presence_penalty": Pair(0.5, 1), "frequency_penalty": Pair(0.5, 1),
    "repetition_penalty": Pair(1.5, 2), "seed": Pair(5, 6), "stop": Pair("a", ["b"]),
    "logit_bias": Pair({5: 1}, {6: 1}), "model": Pair("tiny", "large"), "stream": Pair(True, False),
}  # fmt: skip
COMMON = SAMPLING | {
    "n": Pair(1, 2), "stop_token_ids": Pair([5], [6]), "ignore_eos": Pair(True, False), "max_tokens": Pair(5, 6),
    "stream_options": Pair({"include_usage": True}, {}, {"stream": True}),
    "response_format": Pair(schema(OBJECT), schema(OTHER)), "structured_outputs": Pair({"regex": "a"}, {"regex": "b"}),
    "guided_json": Pair(OBJECT, OTHER), "guided_regex": Pair("a", "b"), "guided_choice": Pair(["a"], ["b"]),
    "guided_grammar": Pair('start: "a"', 'start: "b"'), "prompt_logprobs": Pair(1, 2),
}  # fmt: skip
CHOICE = Pair("auto", "none", {"tools": [TOOL]})
COMPLETIONS = COMMON | {
    "prompt": Pair("a", "b"), "logprobs": Pair(1, 2), "echo": Pair(True, False), "best_of": Pair(2, 3),
    "add_special_tokens": Pair(True, False),
}  # fmt: skip
CHAT = COMMON | {
    "messages": Pair([{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]),
    "max_completion_tokens": Pair(5, 6), "logprobs": Pair(True, False), "top_logprobs": Pair(1, 2, {"logprobs": True}),
    "add_generation_prompt": Pair(True, False),
    "continue_final_message": Pair(True, False, {"add_generation_prompt": False}),
    "tools": Pair([TOOL], []), "tool_choice": CHOICE, "parallel_tool_calls": Pair(True, False, {"tools": [TOOL]}),
    "reasoning_effort": Pair("low", "high"), "chat_template_kwargs": Pair({"colour": "red"}, {"colour": "blue"}),
    "thinking_token_budget": Pair(5, 6),
}  # fmt: skip
RESPONSES = {name: dataclasses.replace(pair, more={}) for name, pair in SAMPLING.items()} | {
    "input": Pair("a", "b"), "instructions": Pair("a", "b"), "max_output_tokens": Pair(5, 6),
    "text": Pair({"format": {"type": "json_object"}}, {"format": {"type": "text"}}), "tools": Pair([FLAT], []),
    "tool_choice": Pair("auto", "none", {"tools": [FLAT]}), "reasoning": Pair({"effort": "low"}, {"effort": "high"}),
    "parallel_tool_calls": Pair(True, False, {"tools": [FLAT]}), "stop_token_ids": Pair([5], [6]),
    "ignore_eos": Pair(True, False), "metadata": Pair({"a": "b"}, {"a": "c"}),
    "user": Pair("a", "b"), "chat_template_kwargs": Pair({"colour": "red"}, {"colour": "blue"}),
}  # fmt: skip

FORM = {"type": "json_schema", "schema": OBJECT}
OWN_TOOL = {"name": "f", "input_schema": OBJECT}
ANSWER = {"thinking": Pair({"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}),
          "output_config": Pair({"effort": "low"}, {"effort": "max"})}  # fmt: skip
COUNTED = ANSWER | {
    "model": Pair("tiny", "large"), "messages": CHAT["messages"], "system": Pair("a", [{"type": "text", "text": "b"}]),
    "tools": Pair([OWN_TOOL], []),
    "tool_choice": Pair({"type": "auto"}, {"type": "tool", "name": "g"}, {"tools": [OWN_TOOL]}),
    "chat_template_kwargs": Pair({"colour": "red"}, {"colour": "blue"}),
}  # fmt: skip
MESSAGES = {name: pair for name, pair in SAMPLING.items() if name != "stop"} | COUNTED | {
    "min_tokens": Pair(1, 2), "max_tokens": Pair(5, 6), "stop_sequences": Pair(["a"], ["b"]),
    "tool_choice": Pair({"type": "auto"}, {"type": "any"}, {"tools": [OWN_TOOL]}),
}  # fmt: skip
TO_TEXT = {"return_token_strs": Pair(True, False), "add_special_tokens": Pair(True, False), "model": Pair("tiny", "x")}
TOKENIZED = TO_TEXT | {name: dataclasses.replace(CHAT[name], more={}) for name in token_requests.OF_MESSAGES} | {
    "prompt": Pair("a", "b"), "content": Pair("a", "b"), "add_special": Pair(True, False),
    "with_pieces": Pair(True, False),
}  # fmt: skip


@dataclass(frozen=True)
class Walk:
    """An object of requests: its members as the code knows them, a pair for each, and the request that holds one."""

    endpoint: Endpoint
    known: Collection[str]
    pairs: Mapping[str, Pair]
    place: Callable[[str, Any], dict[str, Any]] = lambda name, value: {name: value}
    without_effect: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, request_fields.Refused] = field(default_factory=dict)


def in_message(name: str, value: Any) -> dict[str, Any]:
    first = {"role": "user"} if name in ("role", "content", "name", "tool_call_id") else {"role": "assistant"}
    content = None if name == "refusal" else "x"
    return {"messages": [{**first, "content": content, name: value}, *BASES[Endpoint.CHAT]["messages"]]}


def in_call(name: str, value: Any) -> dict[str, Any]:
    return in_message("tool_calls", [{**CALL, name: value}])


def item(kind: str) -> Callable[[str, Any], dict[str, Any]]:
    items = {
        "message": {"role": "user", "content": "x"},
        "reasoning": {"type": kind},
        "function_call": {"type": kind, "call_id": "c", "name": "f", "arguments": "{}"},
        "function_call_output": {"type": kind, "call_id": "c", "output": "x"},
    }
    return lambda name, value: {"input": [{**items[kind], name: value}]}


def block(kind: str) -> Callable[[str, Any], dict[str, Any]]:
    blocks = {
        "text": {"type": kind, "text": "x"},
        "thinking": {"type": kind, "thinking": "x"},
        "redacted_thinking": {"type": kind},
        "tool_use": {"type": kind, "id": "c", "name": "f", "input": {}},
        "tool_result": {"type": kind, "tool_use_id": "c", "content": "x"},
    }
    role = "user" if kind in ("text", "tool_result") else "assistant"

    def place(name: str, value: Any) -> dict[str, Any]:
        last = {"role": "user", "content": "and?"}
        return {"messages": [{"role": role, "content": [{**blocks[kind], name: value}]}, last]}

    return place


def as_text(name: str, value: Any) -> dict[str, Any]:
    """A request to /tokenize of what the field is for."""
    if name in token_requests.OF_MESSAGES:
        return {"prompt": None, **BASES[Endpoint.COUNT_TOKENS], name: value}
    return {"prompt": None, "content": "x", name: value} if name in token_requests.OF_CONTENT else {name: value}


def in_format(name: str, value: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "schema": OBJECT, name: value}}}


BLOCKS = {
    "text": {"text": Pair("a", "b")},
    "thinking": {"thinking": Pair("a", "b")},
    "redacted_thinking": {},
    "tool_use": {"id": Pair("a", "b"), "name": Pair("f", "g"), "input": Pair({}, {"a": 1})},
    "tool_result": {"tool_use_id": Pair("a", "b"), "content": Pair("a", [{"type": "text", "text": "b"}]),
                    "is_error": Pair(True, False)},
}  # fmt: skip
ITEMS = {
    "message": {"role": Pair("user", "system"), "content": Pair("a", "b")},
    "reasoning": {
        "content": Pair([{"type": "reasoning_text", "text": "a"}], [{"type": "reasoning_text", "text": "b"}]),
        "summary": Pair([{"type": "summary_text", "text": "a"}], [{"type": "summary_text", "text": "b"}]),
    },
    "function_call": {"call_id": Pair("a", "b"), "name": Pair("f", "g"), "arguments": Pair("{}", '{"a": 1}')},
    "function_call_output": {"call_id": Pair("a", "b"), "output": Pair("a", "b")},
}
FORMATS = {
    "json_schema": {"json_schema": Pair({"schema": OBJECT}, {"schema": OTHER})},
    "structural_tag": {"triggers": Pair(["<f"], ["<"]), "structures": Pair(TAG["structures"], [])},
}  # fmt: skip
WHOLE = {"structural_tag": {"type": "structural_tag", **TAG}, "json_schema": schema(OBJECT)}
WALKS = {
    "completions": Walk(Endpoint.COMPLETIONS, request_fields.COMPLETIONS, COMPLETIONS,
                        without_effect=request_fields.WITHOUT_EFFECT, refused=request_fields.REFUSED),
    "chat": Walk(Endpoint.CHAT, request_fields.CHAT, CHAT, without_effect=request_fields.WITHOUT_EFFECT,
                 refused=request_fields.REFUSED),
    "responses": Walk(Endpoint.RESPONSES, responses_request.KNOWN, RESPONSES,
                      without_effect=request_fields.RESPONSES_WITHOUT_EFFECT,
                      refused=responses_request.RESPONSES_REFUSED),
    "message": Walk(Endpoint.CHAT, conversation.MESSAGE_FIELDS, {
        "role": Pair("user", "system"), "content": Pair("a", PARTS), "name": Pair("a", "b"),
        "tool_call_id": Pair("a", "b"), "tool_calls": Pair([CALL], []), "reasoning": Pair("a", "b"),
        "reasoning_content": Pair("a", "b"), "refusal": Pair("a", "b"),
        "reasoning_details": Pair([{"type": "reasoning.text", "text": "a"}], [{"summary": "b"}, {"data": "="}]),
        "thinking_blocks": Pair([{"type": "thinking", "thinking": "a"}], [{"thinking": "b"}])},
        in_message, conversation.MESSAGE_WITHOUT_EFFECT),
    **{f"part {kind}": Walk(Endpoint.CHAT, ("type", text), {"type": Pair(kind, "image"), text: Pair("a", "b")},
        lambda name, value, kind=kind, text=text: in_message("content", [{"type": kind, text: "x", name: value}]),
        conversation.PART_WITHOUT_EFFECT) for kind, text in conversation.PART_TEXTS.items()},
    "call": Walk(Endpoint.CHAT, conversation.CALL_FIELDS, {
        "id": Pair("a", "b"), "type": Pair("function", "custom"),
        "function": Pair(CALL["function"], {"name": "g", "arguments": "{}"})}, in_call,
        conversation.CALL_WITHOUT_EFFECT),
    "called function": Walk(Endpoint.CHAT, conversation.CALLED_FIELDS, {
        "name": Pair("f", "g"), "arguments": Pair("{}", '{"a": 1}')},
        lambda name, value: in_call("function", {**CALL["function"], name: value}),
        conversation.CALLED_WITHOUT_EFFECT),
    "function": Walk(Endpoint.CHAT, functions.FUNCTION_FIELDS, {
        "name": Pair("f", "g"), "description": Pair("a", "b"), "parameters": Pair(OBJECT, OTHER),
        "strict": Pair(True, False)},
        lambda name, value: {"tools": [{**TOOL, "function": {**TOOL["function"], name: value}}]},
        functions.TOOL_WITHOUT_EFFECT),
    "tool": Walk(Endpoint.CHAT, ("type", "function"), {
        "type": Pair("function", "custom"), "function": Pair(TOOL["function"], {**TOOL["function"], "name": "g"})},
        lambda name, value: {"tools": [{**TOOL, name: value}]}, functions.TOOL_WITHOUT_EFFECT),
    "stream_options": Walk(Endpoint.CHAT, request_fields.STREAM_OPTIONS, {
        "include_usage": Pair(True, False), "continuous_usage_stats": Pair(True, False)},
                           lambda name, value: {"stream": True, "stream_options": {"include_usage": True, name: value}},
                           refused=request_fields.STREAM_OPTIONS_REFUSED),
    "structured_outputs": Walk(Endpoint.CHAT, guides.STRUCTURED, {
        "json": Pair(OBJECT, OTHER), "json_object": Pair(True, False), "regex": Pair("a", "b"),
        "choice": Pair(["a"], ["b"]), "grammar": Pair('start: "a"', 'start: "b"'),
        "structural_tag": Pair(TAG, {**TAG, "triggers": ["<"]})},
        lambda name, value: {"structured_outputs": {name: value}}),
    "response_format.json_schema": Walk(Endpoint.CHAT, guides.JSON_SCHEMA_FIELDS, {"schema": Pair(OBJECT, OTHER)},
        lambda name, value: {"response_format": {**schema(OBJECT), "json_schema": {"schema": OBJECT, name: value}}},
        guides.JSON_SCHEMA_WITHOUT_EFFECT),
    **{f"response_format {kind}": Walk(Endpoint.CHAT, members, FORMATS.get(kind, {}),
        lambda name, value, kind=kind: {"response_format": {**WHOLE.get(kind, {"type": kind}), name: value}})
        for kind, members in guides.RESPONSE_FORMATS.items()},
    **{f"input {kind}": Walk(Endpoint.RESPONSES, members, ITEMS[kind], item(kind),
                             responses_request.ITEM_WITHOUT_EFFECT)
       for kind, members in responses_request.ITEM_FIELDS.items()},
    "messages": Walk(Endpoint.MESSAGES, messages.KNOWN, MESSAGES, without_effect=messages.WITHOUT_EFFECT,
                     refused=messages.REFUSED),
    "count_tokens": Walk(Endpoint.COUNT_TOKENS, messages.COUNTED, COUNTED,
                         without_effect=messages.COUNT_WITHOUT_EFFECT, refused=messages.REFUSED),
    "messages message": Walk(Endpoint.MESSAGES, messages.MESSAGE_FIELDS, {
        "role": Pair("user", "system"), "content": Pair("a", [{"type": "text", "text": "b"}])},
        lambda name, value: {"messages": [{"role": "user", "content": "x", name: value}]}),
    **{f"block {kind}": Walk(Endpoint.MESSAGES, members, BLOCKS[kind], block(kind), messages.BLOCK_WITHOUT_EFFECT[kind])
       for kind, members in messages.BLOCK_FIELDS.items()},
    "message tool": Walk(Endpoint.MESSAGES, messages.TOOL_FIELDS, {
        "name": Pair("f", "g"), "description": Pair("a", "b"), "input_schema": Pair(OBJECT, OTHER),
        "strict": Pair(True, False)},
        lambda name, value: {"tools": [{**OWN_TOOL, name: value}]}, messages.TOOL_WITHOUT_EFFECT,
        messages.TOOL_REFUSED),
    "tool_choice": Walk(Endpoint.MESSAGES, messages.CHOICE_FIELDS, {
        "type": Pair("tool", "bash"), "name": Pair("f", "g"), "disable_parallel_tool_use": Pair(True, False)},
        lambda name, value: {"tools": [OWN_TOOL], "tool_choice": {"type": "tool", "name": "f", name: value}}),
    "thinking": Walk(Endpoint.MESSAGES, messages.THINKING_FIELDS, {
        "type": Pair("enabled", "sometimes"), "budget_tokens": Pair(5, 6), "display": Pair("summarized", "omitted")},
        lambda name, value: {"thinking": {"type": "enabled", "budget_tokens": 5, name: value}}),
    "output_config": Walk(Endpoint.MESSAGES, messages.OUTPUT_FIELDS, {
        "effort": Pair("low", "max"), "format": Pair(FORM, {**FORM, "schema": OTHER})},
        lambda name, value: {"output_config": {name: value}}),
    "output_config.format": Walk(Endpoint.MESSAGES, messages.FORMAT_FIELDS, {
        "type": Pair("json_schema", "xml"), "schema": Pair(OBJECT, OTHER)},
        lambda name, value: {"output_config": {"format": {**FORM, name: value}}}),
    "tokenize": Walk(Endpoint.TOKENIZE, token_requests.TOKENIZE, TOKENIZED, as_text,
                     refused=token_requests.TOKENIZE_REFUSED),
    "detokenize": Walk(Endpoint.DETOKENIZE, token_requests.DETOKENIZE, {
        "tokens": Pair([5], [6]), "model": Pair("tiny", "large")}),
    "text.format": Walk(Endpoint.RESPONSES, responses_request.SCHEMA_FIELDS, {
        "type": Pair("json_schema", "text"), "name": Pair("a", "b"), "description": Pair("a", "b"),
        "schema": Pair(OBJECT, OTHER), "strict": Pair(True, False)}, in_format),
}  # fmt: skip
LIKELY = {"strict": Pair(True, False), "annotations": Pair([], [{"type": "url_citation"}]), "logprobs": Pair([], [1]),
          "metadata": Pair({"a": "b"}, {}), "type": Pair(None, "custom")}  # fmt: skip
MEMBERS = [(walk, name) for walk, found in WALKS.items() for name in sorted(found.known)]
WITHOUT_EFFECT = [(walk, name) for walk, w in WALKS.items() for name in sorted({*w.without_effect} - {*w.known})]
REFUSED = [(walk, name) for walk, w in WALKS.items() for name in sorted({*w.refused} - {*w.known, *w.without_effect})]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> RequestReader:
    folder = tmp_path_factory.mktemp("fields")
    (folder / "template.jinja").write_text(TEMPLATE)
    engine: Path = write_engine_files(folder / "tiny")
    tokenizer = Tokenizer.from_file(str(engine / TOKENIZER_DIR / "tokenizer.json"))
    first = (tokenizer.id_to_token(1), 1)
    tokenizer.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    tokenizer.save(str(engine / TOKENIZER_DIR / "tokenizer.json"))
    options = GatewayOptions(
        engine=engine, chat_template=folder / "template.jinja", tool_call_format="hermes", reasoning_format="think"
    )
    return RequestReader(ServedModel.load(options), options)


def outcome(reader: RequestReader, walk: Walk, *changes: Mapping[str, Any]) -> dict[str, Any] | ApiError:
    """All that decides the engine's tensors and the answer's form; or the refusal."""
    body = dict(BASES[walk.endpoint])
    for change in changes:
        body |= change
    try:
        asked = reader.read(json.dumps(body).encode(), walk.endpoint)
    except ApiError as error:
        return error
    found = dataclasses.asdict(asked)
    del found["names"]  # of fields, in errors
    return found


@pytest.mark.parametrize("walk", WALKS)
def test_every_member_is_walked(walk: str) -> None:
    missing = set(WALKS[walk].pairs) ^ set(WALKS[walk].known)
    assert not missing, f"{missing}: give each field a Pair of two values, one of sampling in SAMPLING"


@pytest.mark.parametrize(("walk", "name"), MEMBERS)
def test_two_values_are_two_requests(reader: RequestReader, walk: str, name: str) -> None:
    found = WALKS[walk]
    pair = found.pairs[name]
    one = outcome(reader, found, pair.more, found.place(name, pair.one))
    other = outcome(reader, found, pair.more, found.place(name, pair.other))
    assert isinstance(one, dict), one
    assert one != other
    if isinstance(other, ApiError):
        assert other.status in (400, 404) and other.param is not None, "only a value that cannot be served is refused"


@pytest.mark.parametrize(("walk", "name"), WITHOUT_EFFECT)
def test_what_has_no_effect_has_a_reason(reader: RequestReader, walk: str, name: str) -> None:
    found = WALKS[walk]
    assert len(found.without_effect[name]) > 10 and name not in found.known
    pair = LIKELY.get(name, Pair("a", "b"))
    one, other = (outcome(reader, found, found.place(name, value)) for value in (pair.one, pair.other))
    assert isinstance(one, dict) and one == other


@pytest.mark.parametrize(("walk", "name"), REFUSED)
def test_what_is_refused_is_refused_by_name(reader: RequestReader, walk: str, name: str) -> None:
    found = WALKS[walk]
    error = outcome(reader, found, found.place(name, {"odd": 1}))
    assert isinstance(error, ApiError) and error.param is not None and error.param.endswith(name)
    empty = outcome(reader, found, found.place(name, None))
    for value in found.refused[name].neutral:
        assert outcome(reader, found, found.place(name, value)) == empty, "a value that asks for nothing"
    members = [*found.refused[name].members]
    assert not members or outcome(reader, found, found.place(name, members)) == empty
    assert not members or isinstance(outcome(reader, found, found.place(name, [*members, "odd"])), ApiError)


@pytest.mark.parametrize("walk", WALKS)
def test_what_is_not_known_is_refused_by_name(reader: RequestReader, walk: str) -> None:
    found = WALKS[walk]
    error = outcome(reader, found, found.place("max_token", 5))
    assert isinstance(error, ApiError) and error.status == 400
    assert error.param is not None and (error.param.endswith("max_token") or error.param == "input")


@pytest.mark.parametrize("value", [None, 5, [], {}, "odd"])
@pytest.mark.parametrize(("walk", "name"), [(walk, name) for walk, name in MEMBERS if name != "model"])
def test_any_value_is_served_or_refused(reader: RequestReader, walk: str, name: str, value: Any) -> None:
    """Nothing but ApiError is raised, and it is the request's fault."""
    found = outcome(reader, WALKS[walk], WALKS[walk].pairs[name].more, WALKS[walk].place(name, value))
    assert isinstance(found, dict) or found.status == 400


def allows(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether a schema of /openapi.json does; of an object it looks at what is required."""
    if "anyOf" in schema:
        return any(allows(each, value) for each in schema["anyOf"])
    types = {"null": type(None), "boolean": bool, "integer": int, "number": (int, float), "string": str,
             "array": list, "object": dict}  # fmt: skip
    named = schema.get("type", [*types])
    kinds = [types[name] for name in ([named] if isinstance(named, str) else named)]
    if not any(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for kind in kinds):
        return False
    if isinstance(value, list):
        return all(allows(schema.get("items", {}), each) for each in value) and len(value) >= schema.get("minItems", 0)
    if isinstance(value, dict):
        return set(schema.get("required", ())) <= {*value}
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value in schema.get("enum", [value])
    above = value > schema.get("exclusiveMinimum", value - 1) and value >= schema.get("minimum", value)
    return above and value <= schema.get("maximum", value)


ODD = (None, True, -1, 0, 5, 0.5, 1e9, "odd", [], ["odd"], [5], {})
OF_PATHS = dict(zip(openapi.BODIES, ("completions", "chat", "responses", "messages", "count_tokens", "tokenize",
                                     "detokenize"), strict=True))  # fmt: skip
BESIDE = {"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "add_special", "with_pieces"}
"""Refused for what stands beside them, too."""


@pytest.mark.parametrize(("path", "walk"), OF_PATHS.items())
def test_the_document_allows_what_is_served(reader: RequestReader, path: str, walk: str) -> None:
    """And of single numbers and flags nothing else."""
    found, schema = WALKS[walk], openapi.body_schema(openapi.BODIES[path], GatewayOptions())
    assert set(schema["properties"]) == {*found.known, *found.without_effect, *found.refused}
    assert {*DESCRIPTIONS} == {name for each in openapi.BODIES.values() for name in each.known}
    for name in found.known:
        member, pair = schema["properties"][name], found.pairs[name]
        is_scalar = {"integer", "number", "boolean"} & {*member.get("type", ())} and name not in BESIDE
        for value in (pair.one, *ODD):
            served = isinstance(outcome(reader, found, pair.more, found.place(name, value)), dict)
            assert allows(member, value) or not served, (name, value)
            assert served or not is_scalar or not allows(member, value), (name, value)


@pytest.mark.parametrize("kind", [[], {}, 5])
def test_a_type_that_is_no_text_is_refused(reader: RequestReader, kind: Any) -> None:
    for walk, body in (("chat", {"response_format": {"type": kind}}), ("responses", {"input": [{"type": kind}]})):
        found = outcome(reader, WALKS[walk], body)
        assert isinstance(found, ApiError) and found.status == 400


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (Endpoint.CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        (Endpoint.CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        (Endpoint.RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ],
)
def test_what_the_template_does_not_read_is_refused(tmp_path: Path, endpoint, body: dict, param: str) -> None:
    options = GatewayOptions(engine=write_engine_files(tmp_path / "tiny"))
    reader = RequestReader(ServedModel.load(options), options)
    with pytest.raises(ApiError, match="is not read by the model's chat template") as error:
        reader.read(json.dumps({**BASES[endpoint], **body}).encode(), endpoint)
    assert error.value.param == param
