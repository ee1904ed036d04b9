"""Reasoning through the official client, over a Triton that is told what to say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from kvforge.common.errors import KvforgeError
from kvforge.gateway.http.server import make_server
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.requests.responses_request import read_response_request
from kvforge.manifest import TOKENIZER_DIR
from tests.cpu.gateway.engine_files import write_engine_files
from tests.cpu.gateway.fake_triton import FakeTriton, Row, bytes_of
from tests.cpu.gateway.http_calls import WAIT_S

HELLO = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function.arguments }}</tool_call>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% if thinks is defined %}<think>\n{% if not thinks %}"
    "\n</think>\n\n{% endif %}{% endif %}{% endif %}{% if tools %}{% endif %}"
)
THOUGHT = '<think>\nWho is "it"?\n</think>\n\nGrüße'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reasoning") / "template.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def url(start_shared: Callable[..., str], template: Path) -> str:
    return start_shared(chat_template=template, tool_call_format="hermes")


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return client_of(url)


def say(triton: FakeTriton, text: str, finish: str = "stop") -> None:
    triton.script = lambda request: bytes_of(text + (" " if finish == "stop" else ""), request, finish)


def answers(client: openai.OpenAI, **ask) -> list[tuple[str | None, str | None, str]]:
    """Reasoning, content and the reason of the end, whole and as they are streamed."""
    ask = {"model": "tiny", "messages": HELLO, **ask}
    choice = client.chat.completions.create(**ask).choices[0]
    message = choice.message.model_extra
    assert message.get("reasoning") == message.get("reasoning_content")
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**ask, stream=True):
        (part,) = chunk.choices
        extra = part.delta.model_extra
        assert extra.get("reasoning") == extra.get("reasoning_content")
        if extra.get("reasoning"):
            assert not streamed[1] and not part.delta.content
        streamed[0] += extra.get("reasoning_content") or ""
        streamed[1] += part.delta.content or ""
        reason = part.finish_reason
    whole = (message.get("reasoning_content"), choice.message.content, choice.finish_reason)
    return [whole, (streamed[0] or None, streamed[1], reason)]


@pytest.mark.parametrize(
    ("text", "finish", "reasoning", "content"),
    [
        (THOUGHT, "stop", 'Who is "it"?', "Grüße"),
        ("plain", "stop", None, "plain"),
        ("<think>still at", "length", "still at", ""),
        ("<think>\n\n</think>\n\nat once", "stop", None, "at once"),
        ("now <think>a</think>", "stop", None, "now <think>a</think>"),
    ],
)
def test_reasoning_is_no_content(client: openai.OpenAI, triton: FakeTriton, text, finish, reasoning, content) -> None:
    say(triton, text, finish)
    assert answers(client) == 2 * [(reasoning, content, finish)]


def test_the_prompt_may_begin_it(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, "so it is\n</think>\n\nYes")
    kwargs = {"extra_body": {"chat_template_kwargs": {"thinks": True}}}
    assert answers(client, **kwargs) == 2 * [("so it is", "Yes", "stop")]
    assert answers(client) == 2 * [(None, "so it is\n</think>\n\nYes", "stop")]


@pytest.mark.parametrize(
    ("begun", "reasoning", "content"),
    [
        ("<think>\nSo", "it is", "Yes"),
        ("<think>", "it is", "Yes"),
        ([{"type": "text", "text": "<think>So"}], "it is", "Yes"),
        ("<think>a</think>So", None, "it is\n</think>\n\nYes"),
        ("So", None, "it is\n</think>\n\nYes"),
    ],
)
def test_a_message_that_is_continued_may_begin_it(
    client: openai.OpenAI, triton: FakeTriton, begun, reasoning, content
) -> None:
    say(triton, "it is\n</think>\n\nYes")
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    more = {"messages": messages, "extra_body": {"continue_final_message": True}}
    assert answers(client, **more) == 2 * [(reasoning, content, "stop")]


def test_calls_after_it(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, f"<think>call {CALL}?</think>\n{CALL}")
    for reasoning, content, reason in answers(client, tools=[TOOL]):
        assert (reasoning, content or None, reason) == (f"call {CALL}?", None, "tool_calls")
    call = client.chat.completions.create(model="tiny", messages=HELLO, tools=[TOOL]).choices[0].message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("f", "{}")


def guide_of(triton: FakeTriton) -> tuple[str, dict[str, Any]]:
    """Kind and guide of the last request; what is no JSON under "text"."""
    kind, text = (triton.requests[-1].texts(f"guided_decoding_guide{end}")[0] for end in ("_type", ""))
    return kind, json.loads(text) if text.startswith("{") else {"text": text}


AROUND = {"opens": ["<think>"], "closes": ["</think>"]}


@pytest.mark.parametrize(
    ("thinks", "begun", "text", "reasoning"),
    [
        (None, False, '<think>so\n</think>\n\n{"a": 5}', "so"),
        (None, False, '{"a": 5}', None),
        (True, True, 'so\n</think>\n\n{"a": 5}', "so"),
        (False, None, '{"a": 5}', None),
    ],
)
def test_guides_begin_behind_it(
    client: openai.OpenAI, triton: FakeTriton, thinks: bool | None, begun: bool | None, text: str, reasoning: str | None
) -> None:
    """Where the prompt has begun it, where the answer may begin it, and where the template has written its end."""
    say(triton, text)
    kwargs = {} if thinks is None else {"chat_template_kwargs": {"thinks": thinks}}
    form = {"extra_body": {"structured_outputs": {"regex": ".*"}, **kwargs}}
    assert answers(client, **form) == 2 * [(reasoning, '{"a": 5}', "stop")]
    kind, guide = guide_of(triton)
    if begun is None:
        assert (kind, guide) == ("regex", {"text": ".*"})
    else:
        assert kind == "after_reasoning" and {**AROUND, "begun": begun, "then": []}.items() <= guide.items()
        assert (guide["kind"], guide["guide"]) == ("regex", ".*")
    say(triton, "so it is still")
    whole = client.chat.completions.create(model="tiny", messages=HELLO, **form).choices[0].message
    assert (whole.content == "") == (begun is True), "an answer that ends within its reasoning has no content"


@pytest.mark.parametrize(("thinks", "before"), [(None, "<think>so</think>\n"), (True, "so</think>\n"), (False, "")])
def test_forced_calls_come_behind_it(
    client: openai.OpenAI, triton: FakeTriton, thinks: bool | None, before: str
) -> None:
    """The guide begins the call, and the prompt only where no reasoning can come before."""
    opens = "<tool_call>\n"
    say(triton, f"{before}{opens if before else ''}{CALL.removeprefix(opens)}")
    kwargs = {} if thinks is None else {"extra_body": {"chat_template_kwargs": {"thinks": thinks}}}
    ask = {"tools": [TOOL], "tool_choice": "required", **kwargs}
    for reasoning, content, reason in answers(client, **ask):
        assert (reasoning, content or None, reason) == ("so" if before else None, None, "tool_calls")
    message = client.chat.completions.create(model="tiny", messages=HELLO, **ask).choices[0].message
    assert [(one.function.name, one.function.arguments) for one in message.tool_calls] == [("f", "{}")]
    kind, guide = guide_of(triton)
    prompt = bytes(token - 3 for token in triton.requests[-1].prompt).decode()
    assert prompt.endswith(opens) == (not before)
    if before:
        assert {**AROUND, "begun": thinks is True, "then": [opens]}.items() <= guide.items()
        assert guide["kind"] == "json_schema"
    else:
        assert kind == "json_schema"


@pytest.mark.parametrize(("begun", "guide_begun"), [("<think>so", True), ("<think>so</think>\n{", None), ("{", None)])
def test_guides_of_continued_messages(client: openai.OpenAI, triton: FakeTriton, begun: str, guide_begun) -> None:
    say(triton, "</think>5" if guide_begun else "5")
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "structured_outputs": {"regex": "[0-9]"}}
    found = client.chat.completions.create(model="tiny", messages=messages, extra_body=more).choices[0].message
    assert found.content == "5"
    kind, guide = guide_of(triton)
    assert kind == ("after_reasoning" if guide_begun else "regex") and guide.get("begun") == guide_begun


def test_a_budget(start: Callable[..., str], triton: FakeTriton, tmp_path: Path, client: openai.OpenAI) -> None:
    """It needs a token that ends the reasoning, and is kept by a guide, also where none else is asked for."""
    with pytest.raises(openai.BadRequestError, match="one token, and this one's does not") as refused:
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"thinking_token_budget": 5})
    assert refused.value.param == "thinking_token_budget"
    engine = write_engine_files(tmp_path / "tiny")
    file = str(engine / TOKENIZER_DIR / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")])
    tokenizer.save(file)
    begin, end = (tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    client = client_of(start(engine=engine, reasoning_format="think", tool_call_format="hermes"))

    def asked(**more: Any) -> tuple[str, dict[str, Any]]:
        client.chat.completions.create(
            model="tiny", messages=HELLO, **{"extra_body": {"thinking_token_budget": 7}, **more}
        )
        return guide_of(triton)

    for more, inner in (
        ({}, "ebnf_grammar"),
        ({"response_format": {"type": "json_object"}}, "json"),
        ({"tools": [TOOL]}, "structural_tag"),
        ({"tools": [TOOL], "tool_choice": "required"}, "json_schema"),
    ):
        kind, guide = asked(**more)
        assert kind == "after_reasoning" and guide["kind"] == inner
        assert {"opens": [begin], "closes": [end], "budget": 7, "begun": False}.items() <= guide.items()
    assert asked(extra_body={"thinking_token_budget": 0})[1]["budget"] == 0
    for wrong in (-1, 1.5, "5", True):
        with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
            asked(extra_body={"thinking_token_budget": wrong})
    unread = client_of(start(reasoning_format="none"))
    with pytest.raises(openai.BadRequestError, match="needs a model whose reasoning is known"):
        unread.chat.completions.create(model="tiny", messages=HELLO, extra_body={"thinking_token_budget": 5})


def test_it_is_left_in_the_text_where_that_is_asked_for(
    start: Callable[..., str], triton: FakeTriton, template: Path
) -> None:
    say(triton, THOUGHT)
    url = start(chat_template=template, reasoning_format="none")
    assert answers(client_of(url)) == 2 * [(None, THOUGHT, "stop")]


def test_unknown_formats(engine_files: Path) -> None:
    with pytest.raises(
        KvforgeError, match="--reasoning-format xml is not known; give one of gemma4, harmony, think, or none"
    ):
        make_server(GatewayOptions(engine=engine_files, reasoning_format="xml"))


@pytest.mark.parametrize("special", [False, True])
def test_markers_that_are_tokens(start: Callable[..., str], triton: FakeTriton, tmp_path: Path, special: bool) -> None:
    """They are seen and counted; a special one does not show in the text of others."""
    engine = write_engine_files(tmp_path / "tiny")
    file = str(engine / TOKENIZER_DIR / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    marks = ("<think>", "</think>")
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    tokenizer.save(file)
    begin, end = (tokenizer.token_to_id(mark) for mark in marks)

    async def script(request):
        for token in (begin, *(byte + 3 for byte in b"no </think>"), end, ord("a") + 3):
            yield Row([token])
        yield Row([2], finish_reason="stop")

    triton.script = script
    client = client_of(start(engine=engine, reasoning_format="think"))
    assert answers(client) == 2 * [("no </think>", "a", "stop")]
    usage = client.chat.completions.create(model="tiny", messages=HELLO).usage
    assert usage.completion_tokens_details.reasoning_tokens == 13
    response = client.responses.create(model="tiny", input="hi")
    assert response.usage.output_tokens_details.reasoning_tokens == 13
    client = client_of(start(engine=engine, reasoning_format="think", tool_call_format="hermes"))
    client.chat.completions.create(model="tiny", messages=HELLO, tools=[TOOL])
    kind, guide = guide_of(triton)
    assert kind == "after_reasoning" and {"opens": [begin], "closes": [end], "then": []}.items() <= guide.items()


def test_channels(start: Callable[..., str], triton: FakeTriton, tmp_path: Path) -> None:
    engine = write_engine_files(tmp_path / "tiny")
    file = str(engine / TOKENIZER_DIR / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.save(file)
    ids = {mark: tokenizer.token_to_id(mark) for mark in marks}
    parts = ["<|channel|>", "analysis", "<|message|>", "They greet.", "<|end|>", "<|start|>", "assistant"]
    parts += ["<|channel|>", "final", "<|message|>", "Hello!"]

    async def script(request):
        for part in parts:
            for token in [ids[part]] if part in ids else [byte + 3 for byte in part.encode()]:
                yield Row([token])
        yield Row([2], finish_reason="stop")

    triton.script = script
    client = client_of(start(engine=engine, reasoning_format="harmony"))
    assert answers(client) == 2 * [("They greet.", "Hello!", "stop")]
    assert client.responses.create(model="tiny", input="hi").output_text == "Hello!"


def test_calls_in_channels(start: Callable[..., str], triton: FakeTriton, tmp_path: Path) -> None:
    """Free ones and forced ones behind the reasoning; the model ends both with a token that ends texts."""
    engine = write_engine_files(tmp_path / "tiny")
    file = str(engine / TOKENIZER_DIR / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.save(file)
    ids = {mark: tokenizer.token_to_id(mark) for mark in marks}
    parts = ["<|channel|>", "analysis", "<|message|>", "I call.", "<|end|>", "<|start|>", "assistant"]
    parts += ["<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>", "{}"]

    async def script(request):
        for part in parts:
            for token in [ids[part]] if part in ids else [byte + 3 for byte in part.encode()]:
                yield Row([token])
        yield Row([ids["<|call|>"]], finish_reason="stop")

    triton.script = script
    client = client_of(start(engine=engine, reasoning_format="harmony", tool_call_format="harmony"))
    for choice in ("auto", "required"):
        ask = {"tools": [TOOL], "tool_choice": choice}
        for found, content, reason in answers(client, **ask):
            assert (found, content or None, reason) == ("I call.", None, "tool_calls")
        message = client.chat.completions.create(model="tiny", messages=HELLO, **ask).choices[0].message
        assert [(one.function.name, one.function.arguments) for one in message.tool_calls] == [("f", "{}")]
    _, guide = guide_of(triton)
    assert guide["then"] == [ids["<|channel|>"], "commentary to=functions."] and guide["repeats"] is True
    assert guide["opens"] == [ids["<|channel|>"], "analysis", ids["<|message|>"]]
    assert guide["closes"] == [ids["<|end|>"], ids["<|start|>"], "assistant"]
    client.chat.completions.create(model="tiny", messages=HELLO, response_format={"type": "json_object"})
    assert guide_of(triton)[1]["then"] == [ids["<|channel|>"], "final", ids["<|message|>"]]
    with pytest.raises(openai.BadRequestError, match="excludes tools with this model") as refused:
        client.chat.completions.create(
            model="tiny", messages=HELLO, tools=[TOOL], extra_body={"thinking_token_budget": 5}
        )
    assert refused.value.param == "thinking_token_budget"


def test_items_of_responses(client: openai.OpenAI, triton: FakeTriton) -> None:
    say(triton, THOUGHT)
    whole = client.responses.create(model="tiny", input="hi")
    with client.responses.stream(model="tiny", input="hi") as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        thought, message = response.output
        assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", 'Who is "it"?', [])
        assert (message.type, response.output_text) == ("message", "Grüße")
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert kinds.count("response.output_item.done") == 2
    again = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in whole.output)]
    client.responses.create(model="tiny", input=[*again, {"role": "user", "content": "and?"}])
    prompt = bytes(token - 3 for token in triton.requests[-1].prompt).decode()
    assert prompt == '[user]hi[assistant]<think>Who is "it"?</think>Grüße[user]and?[assistant]'


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ("ra", [("r0", "a1")]),
        ("r", [("r0", "")]),
        ("raa", [("r0", "a1"), (None, "a2")]),
        ("rr", [("r0", ""), ("r1", "")]),
        ("rra", [("r0", ""), ("r1", "a2")]),
        ("rara", [("r0", "a1"), ("r2", "a3")]),
        ("ara", [(None, "a0"), ("r1", "a2")]),
        ("aa", [(None, "a0"), (None, "a1")]),
    ],
)
def test_no_item_takes_the_place_of_another(items: str, said: list[tuple[str | None, str]]) -> None:
    """Messages of the assistant (a) and what it thought before them (r)."""
    given = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": f"r{at}"}], "summary": []}
        if kind == "r"
        else {"role": "assistant", "content": f"a{at}"}
        for at, kind in enumerate(items)
    ]
    chat = read_response_request({"input": given}, 1000, {"temperature": 1.0, "top_p": 1.0}).chat
    assert [(one.get("reasoning_content"), one["content"]) for one in chat["messages"]] == said
