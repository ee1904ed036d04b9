"""Tools through the official client, over a Triton that is told what to say."""

import json
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from kvforge.common.errors import KvforgeError
from kvforge.common.refusals import Refusal
from kvforge.gateway.http.server import make_server
from kvforge.gateway.options import GatewayOptions
from kvforge.manifest import TOKENIZER_DIR
from kvforge.runtime.requests.guided_decoding import guide_error
from kvforge.serving.contract.failures import failed
from tests.cpu.gateway.chat_template import TEMPLATE
from tests.cpu.gateway.engine_files import write_engine_files
from tests.cpu.gateway.fake_triton import FakeTriton, Row, bytes_of
from tests.cpu.gateway.http_calls import WAIT_S, post
from tests.cpu.gateway.test_openai_refusals import check

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "g"}},
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Zürich"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def url(url_of_template: str) -> str:
    return url_of_template


def say(triton: FakeTriton, text: str, finish: str = "stop") -> None:
    triton.script = lambda request: bytes_of(text + (" " if finish == "stop" else ""), request, finish)


def prompt_of(triton: FakeTriton) -> str:
    return bytes(token - 3 for token in triton.requests[-1].prompt).decode()


def answers(client: openai.OpenAI, **ask) -> list:
    """The choice, whole and as the client puts it together from a stream."""
    ask = {"model": "tiny", "messages": HELLO, "tools": TOOLS, **ask}
    whole = client.chat.completions.create(**ask).choices[0]
    with client.chat.completions.stream(**ask) as stream:
        return [whole, stream.get_final_completion().choices[0]]


def calls_of(choice) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


@pytest.mark.parametrize(
    ("text", "finish", "content", "calls", "reason"),
    [
        (CALL, "stop", None, [("f", '{"city": "Zürich"}')], "tool_calls"),
        (f"So:\n{CALL}\n{OTHER}", "stop", "So:", [("f", '{"city": "Zürich"}'), ("g", "{}")], "tool_calls"),
        ("just <tool text", "stop", "just <tool text", [], "stop"),
        ("<tool_call>\n{\"na", "length", "<tool_call>\n{\"na", [], "length"),
        (CALL[:42], "length", None, [("f", '{"c')], "length"),
        ('<tool_call>{"name": "h"}', "length", '<tool_call>{"name": "h"}', [], "length"),
    ],
)  # fmt: skip
def test_auto(client: openai.OpenAI, triton: FakeTriton, text, finish, content, calls, reason) -> None:
    say(triton, text, finish)
    ids = set()
    ask = {"model": "tiny", "messages": HELLO, "tools": TOOLS}
    whole = client.chat.completions.create(**ask).choices[0]
    streamed = {"content": "", "calls": [], "reason": None}
    for chunk in client.chat.completions.create(**ask, stream=True):
        (choice,) = chunk.choices
        streamed["content"] += choice.delta.content or ""
        streamed["reason"] = choice.finish_reason or streamed["reason"]
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(streamed["calls"]) and call.type == "function"
                ids.add(call.id)
                streamed["calls"].append((call.function.name, ""))
            name, arguments = streamed["calls"][call.index]
            streamed["calls"][call.index] = (name, arguments + call.function.arguments)
    assert (whole.message.content, calls_of(whole), whole.finish_reason) == (content, calls, reason)
    assert streamed == {"content": content or "", "calls": calls, "reason": reason}
    ids |= {call.id for call in whole.message.tool_calls or []}
    assert len(ids) == 2 * len(calls) and all(entry.startswith("call_") for entry in ids)
    request = triton.requests[0]
    assert request.texts("guided_decoding_guide_type") == ["structural_tag"]
    tag = json.loads(request.texts("guided_decoding_guide")[0])
    assert [entry["begin"] for entry in tag["structures"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in "fg"
    ]
    assert tag["structures"][0]["schema"]["properties"] == {"city": {"type": "string"}}


def test_a_form_of_the_text_leaves_no_calls(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, CALL)
    for choice in answers(client, response_format={"type": "json_object"}):
        assert (choice.message.content, calls_of(choice), choice.finish_reason) == (CALL, [], "stop")


@pytest.mark.parametrize("text", ["{", '{"na'])
def test_the_marker_in_the_prompt_is_no_content(client: openai.OpenAI, triton: FakeTriton, text: str) -> None:
    say(triton, text, "length")
    ask = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
    assert prompt_of_forced(client, triton, ask).endswith("<tool_call>\n")
    whole = client.chat.completions.create(**ask).choices[0]
    chunks = client.chat.completions.create(**ask, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.message.content == streamed == text and calls_of(whole) == []


def prompt_of_forced(client: openai.OpenAI, triton: FakeTriton, ask: dict) -> str:
    client.chat.completions.create(**ask)
    return prompt_of(triton)


def test_arguments_stream_as_they_come(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, CALL)
    pieces = [
        call.function.arguments
        for chunk in client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert len(pieces) > 10 and json.loads("".join(pieces)) == {"city": "Zürich"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_forced(client: openai.OpenAI, triton: FakeTriton, choice) -> None:
    say(triton, '{"name": "f", "arguments": {"city": "x"}}')
    for found in answers(client, tool_choice=choice):
        assert (found.message.content, calls_of(found)) == (None, [("f", '{"city": "x"}')])
        assert found.finish_reason == "tool_calls"
    assert prompt_of(triton).endswith("[user]hi[a]<tool_call>\n")
    schema = json.loads(triton.requests[0].texts("guided_decoding_guide")[0])
    assert set(schema["$defs"]) == ({"f", "g"} if choice == "required" else {"f"})


def test_none_and_no_tools(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, CALL)
    found = client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, tool_choice="none").choices[0]
    assert (found.message.content, found.message.tool_calls) == (f"{CALL}", None)
    assert "guided_decoding_guide_type" not in triton.requests[0].tensors
    shown = prompt_of(triton)
    assert '"description": "where"' in shown and "strict" not in shown


def test_one_call_only(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, f"{CALL}\n{OTHER}\nbye")
    for found in answers(client, parallel_tool_calls=False):
        assert calls_of(found) == [("f", '{"city": "Zürich"}')] and found.message.content == "\nbye"


def test_several_choices_and_logprobs(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, CALL)
    ask = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**ask)
    assert [calls_of(choice) for choice in whole.choices] == [[("f", '{"city": "Zürich"}')]] * 2
    num_tokens = len(f"{CALL} ".encode())
    assert all(len(choice.logprobs.content) == num_tokens for choice in whole.choices)
    counts = [0, 0]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            counts[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert counts == [num_tokens, num_tokens]


def test_a_conversation_with_calls(client: openai.OpenAI, triton: FakeTriton) -> None:
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]  # fmt: skip
    client.chat.completions.create(model="tiny", messages=messages)
    assert prompt_of(triton) == "[user]hi[assistant]<tool_call>f:city=Bern[tool]raincall_1[a]"


def test_words_for_the_template(client: openai.OpenAI, triton: FakeTriton) -> None:
    client.chat.completions.create(
        model="tiny", messages=HELLO, reasoning_effort="low", extra_body={"chat_template_kwargs": {"colour": "blue"}}
    )
    assert prompt_of(triton) == "lowblue[user]hi[a]"
    body = {"model": "tiny", "messages": HELLO, "reasoning_effort": "low",
            "chat_template_kwargs": {"reasoning_effort": "high"}}  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body=body)


def function(**more) -> list:
    return [{"type": "function", "function": {"name": "f", **more}}]


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


ODD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x)"}, "b": {"type": "integer"}},
       "dependentRequired": {"a": ["b"]}}  # fmt: skip
MANY = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(129)]
WIDE = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(4000)}}
DEEP = json.loads('{"type": "object", "properties": ' + '{"a": {"items": ' * 150 + "{}" + "}}" * 150 + "}")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": MANY}, "tools"),
        ({"tools": function(description="x" * 200_000)}, "tools"),
        ({"tools": function(parameters=WIDE, strict=True)}, "tools[0].function.parameters"),
        ({"tools": function(parameters=WIDE, strict=True), "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": function(parameters=ODD, strict=True)}, "tools[0].function.parameters"),
        ({"tools": function() * 2}, "tools[1].function.name"),
        ({"tools": function(name="a b")}, "tools[0].function.name"),
        ({"tools": function(name="a" * 129)}, "tools[0].function.name"),
        ({"tools": function(parameters=[])}, "tools[0].function.parameters"),
        ({"tools": function(parameters={"type": "array"})}, "tools[0].function.parameters"),
        ({"tools": function(colour="red")}, "tools[0].function.colour"),
        ({"tools": function(strict="yes")}, "tools[0].function.strict"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tool_choice": "required", "structured_outputs": {"json_object": True}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("none", "f")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("auto", "h")}, "tool_choice"),
        ({"tool_choice": "required", "continue_final_message": True, "add_generation_prompt": False},
         "continue_final_message"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ],
)  # fmt: skip
def test_refusals(url: str, triton: FakeTriton, more: dict, param: str) -> None:
    check(post(f"{url}/v1/chat/completions", {"model": "tiny", "messages": HELLO, "tools": TOOLS, **more}), 400, param)
    assert triton.requests == []


def test_nested_schemas_are_served_or_refused(url: str, triton: FakeTriton) -> None:
    for choice in ("auto", "required"):
        body = {"model": "tiny", "messages": HELLO, "tools": function(parameters=DEEP), "tool_choice": choice}
        assert post(f"{url}/v1/chat/completions", body).status in (200, 400)


LEFT = {"f": ["dependentRequired", "pattern"]}


def guide_of(triton: FakeTriton, at: int = -1) -> str:
    return triton.requests[at].texts("guided_decoding_guide")[0]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_guides_cannot_keep_is_left_to_the_model(url: str, triton: FakeTriton, choice: str, stream: bool) -> None:
    """And the answer says so."""
    say(triton, '{"name": "f", "arguments": {"a": "x"}}')
    body = {"model": "tiny", "messages": HELLO, "tools": [*function(parameters=ODD), TOOLS[1]], "tool_choice": choice}
    answer = post(f"{url}/v1/chat/completions", {**body, "stream": stream})
    assert answer.status == 200 and json.loads(answer.headers["x-kvforge-unguided"]) == LEFT
    assert '"b": {"type": "integer"}' in guide_of(triton) and "(?!x)" not in guide_of(triton)
    flat = [{"type": "function", "name": "f", "parameters": ODD}]
    body = {"model": "tiny", "input": "hi", "tools": flat, "tool_choice": choice, "stream": stream}
    answer = post(f"{url}/v1/responses", body)
    assert answer.status == 200 and json.loads(answer.headers["x-kvforge-unguided"]) == LEFT
    kept = post(f"{url}/v1/chat/completions", {"model": "tiny", "messages": HELLO, "tools": TOOLS, "stream": stream})
    assert kept.status == 200 and "x-kvforge-unguided" not in kept.headers


def refuse_first(refusal: Refusal) -> Callable:
    """A script of an engine that refuses every guide of more than a few words."""

    async def script(request):
        if "properties" in request.texts("guided_decoding_guide")[0]:
            yield failed("refused", refusal)
            return
        async for row in bytes_of(f"{OTHER} ", request, "stop"):
            yield row

    return script


COSTLY = guide_error("cannot be used: to compile it takes more than 1.5 s of processor time, simplify it").refusal


@pytest.mark.parametrize("stream", [False, True])
def test_a_guide_that_the_engine_refuses_gives_way_to_a_looser_one(url: str, triton: FakeTriton, stream: bool) -> None:
    triton.script = refuse_first(COSTLY)
    tools = [
        *function(parameters=SCHEMA),
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
    ]
    body = {"model": "tiny", "messages": HELLO, "tools": tools, "stream": stream}
    answer = post(f"{url}/v1/chat/completions", body)
    assert answer.status == 200 and '"name":"g"' in answer.body
    assert json.loads(answer.headers["x-kvforge-unguided"]) == {"f": ["*"]}
    first, second = triton.requests
    assert first.id != second.id and first.prompt == second.prompt
    assert [item["schema"]["type"] for item in json.loads(guide_of(triton))["structures"]] == ["object", "object"]


def test_a_strict_schema_that_the_engine_refuses_is_named(url: str, triton: FakeTriton) -> None:
    triton.script = refuse_first(COSTLY)
    tools = [*function(parameters=SCHEMA, strict=True), TOOLS[1]]
    body = {"model": "tiny", "messages": HELLO, "tools": tools}
    check(post(f"{url}/v1/chat/completions", body), 400, "tools[0].function.parameters", "processor time")
    assert len(triton.requests) == 1


def test_other_refusals_are_not_asked_again(url: str, triton: FakeTriton) -> None:
    triton.script = refuse_first(Refusal("is odd", field="max_tokens"))
    body = {"model": "tiny", "messages": HELLO, "tools": function(parameters=SCHEMA)}
    assert post(f"{url}/v1/chat/completions", body).status == 400 and len(triton.requests) == 1


@pytest.mark.parametrize(
    ("choice", "is_forced"), [("any", True), (allowed("required", "g"), True), (allowed("auto", "g"), False)]
)
def test_choices_of_other_clients(client: openai.OpenAI, triton: FakeTriton, choice, is_forced: bool) -> None:
    say(triton, OTHER.removeprefix("<tool_call>\n") if is_forced else OTHER)
    for found in answers(client, tool_choice=choice):
        assert calls_of(found) == [("g", "{}")]
    assert prompt_of(triton).endswith("<tool_call>\n") == is_forced
    names = {"f", "g"} if choice == "any" else {"g"}
    guide = json.loads(guide_of(triton))
    assert names == (
        set(guide["$defs"]) if is_forced else {item["begin"].split('"')[3] for item in guide["structures"]}
    )
    assert '"name": "f"' in prompt_of(triton), "the template shows all tools"


def test_allowed_tools_of_responses(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, OTHER)
    flat = [{"type": "function", "name": name, "parameters": SCHEMA} for name in "fg"]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    found = client.responses.create(model="tiny", input="hi", tools=flat, tool_choice=choice)
    assert [item.name for item in found.output if item.type == "function_call"] == ["g"]
    assert '"f"' not in guide_of(triton) and found.tool_choice.mode == "auto"
    with pytest.raises(openai.BadRequestError, match=r"'tool_choice\.mode' must be auto or required"):
        client.responses.create(model="tiny", input="hi", tools=flat, tool_choice={**choice, "mode": "none"})


def test_an_unknown_format(start: Callable[..., str], triton: FakeTriton) -> None:
    """Tools are refused with the option that helps; a choice of none needs no format."""
    url = start()
    body = {"model": "tiny", "messages": HELLO, "tools": TOOLS}
    check(post(f"{url}/v1/chat/completions", body), 400, "tools", "--tool-call-format NAME, one of deepseek_v3, ")
    assert post(f"{url}/v1/chat/completions", {**body, "tool_choice": "none"}).status == 200
    say(triton, OTHER)
    given = post(f"{start(tool_call_format='hermes')}/v1/chat/completions", body)
    assert json.loads(given.body)["choices"][0]["finish_reason"] == "tool_calls"


def test_a_format_that_is_not_known(engine_files: Path) -> None:
    with pytest.raises(KvforgeError, match=r"--tool-call-format xml is not known; give one of deepseek_v3, .* hermes"):
        make_server(GatewayOptions(engine=engine_files, tool_call_format="xml"))


LANGUAGES = {
    "qwen3_coder": ("<tool_call>\n", "<function=f>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "function<｜tool▁sep｜>f\n```json\n"
                    '{"city": "Zürich"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    "pythonic": ("[", 'f(city="Zürich")]'),
}  # fmt: skip


@pytest.mark.parametrize("name", LANGUAGES)
def test_languages_that_write_no_objects(
    start: Callable[..., str], triton: FakeTriton, tmp_path: Path, name: str
) -> None:
    prefix, rest = LANGUAGES[name]
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    url = start(tool_call_format=name, chat_template=tmp_path / "template.jinja")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
    tools = [*function(parameters=SCHEMA), TOOLS[1]]
    for choice, text in (("auto", f"So: {prefix}{rest}"), ("required", rest)):
        say(triton, text)
        for found in answers(client, tool_choice=choice, tools=tools):
            assert calls_of(found) == [("f", '{"city": "Zürich"}')] and found.finish_reason == "tool_calls"
            assert found.message.content == ("So:" if choice == "auto" else None)
        assert prompt_of(triton).endswith(f"[a]{prefix}") == (choice == "required")
        assert triton.requests[-1].texts("guided_decoding_guide_type") == ["ebnf_grammar"]


@pytest.mark.parametrize("special", [False, True])
def test_markers_that_are_tokens(start: Callable[..., str], triton: FakeTriton, tmp_path: Path, special: bool) -> None:
    """Seen also where a decoder leaves them out of the text; the guide lets the model write them."""
    engine = write_engine_files(tmp_path / "tiny")
    file = str(engine / TOKENIZER_DIR / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    marks = ("<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    tokenizer.save(file)
    begin, end = (tokenizer.token_to_id(mark) for mark in marks)
    inside = [byte + 3 for byte in '\n{"name": "f", "arguments": {"city": "ü"}}\n'.encode()]

    async def script(request):
        for token in (ord("a") + 3, begin, *inside, end):
            yield Row([token])
        yield Row([2], finish_reason="stop")

    triton.script = script
    url = start(engine=engine, tool_call_format="hermes")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
    for found in answers(client):
        assert (found.message.content, calls_of(found)) == ("a", [("f", '{"city": "ü"}')])
    request = triton.requests[0]
    assert request.texts("guided_decoding_guide_type") == ["ebnf_grammar"]
    assert f"<[{begin}]>" in request.texts("guided_decoding_guide")[0]
    plain = client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content
    assert ("<tool_call>" in plain) == (not special)


def test_stop_strings_and_calls(client: openai.OpenAI, triton: FakeTriton) -> None:
    """One behind a call leaves it whole; one inside cuts it, which the reason says."""
    for stop, reason in (("</tool_call>", "tool_calls"), ("Zür", "stop")):
        cut = CALL[: CALL.index(stop) + len(stop)]
        triton.script = lambda request, cut=cut, stop=stop: bytes_of(cut, request, "stop", stop)
        found = client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, stop=stop).choices[0]
        assert found.finish_reason == reason and found.message.content is None
        assert calls_of(found)[0][1] == ('{"city": "Zürich"}' if reason == "tool_calls" else '{"city": "')
