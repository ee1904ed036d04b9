"""Reasoning through the official client, over a Triton that is told what to say."""

from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from kvforge.common.errors import KvforgeError
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.responses_request import read_response_request
from kvforge.gateway.server import make_server
from kvforge.manifest import TOKENIZER_DIR
from tests.cpu.gateway.engine_files import write_engine_files
from tests.cpu.gateway.fake_triton import FakeTriton, Row, bytes_of
from tests.cpu.gateway.http_calls import WAIT_S

HELLO = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function.arguments }}</tool_call>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% if thinks is defined and thinks %}<think>\n{% endif %}"
    "{% endif %}{% if tools %}{% endif %}"
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


def test_a_guide_writes_the_answer(client: openai.OpenAI, triton: FakeTriton) -> None:
    """Though the prompt has begun the reasoning; a guide that begins it itself is heeded."""
    say(triton, '{"a": 5}')
    form = {"structured_outputs": {"regex": ".*"}, "chat_template_kwargs": {"thinks": True}}
    assert answers(client, extra_body=form) == 2 * [(None, '{"a": 5}', "stop")]
    say(triton, "<think>x</think>y")
    assert answers(client, extra_body=form) == 2 * [("x", "y", "stop")]


def test_it_is_left_in_the_text_where_that_is_asked_for(
    start: Callable[..., str], triton: FakeTriton, template: Path
) -> None:
    say(triton, THOUGHT)
    url = start(chat_template=template, reasoning_format="none")
    assert answers(client_of(url)) == 2 * [(None, THOUGHT, "stop")]


def test_unknown_formats(engine_files: Path) -> None:
    with pytest.raises(KvforgeError, match="--reasoning-format xml is not known; give one of harmony, think, or none"):
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
    guide = triton.requests[-1].texts("guided_decoding_guide")[0]
    assert f"<[{begin},{end}]>" in guide, "the guide of tools lets the model think"


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
    """Free ones behind the reasoning, and forced ones, whose head the prompt has begun; the model ends both with a
    token that ends texts."""
    engine = write_engine_files(tmp_path / "tiny")
    file = str(engine / TOKENIZER_DIR / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.save(file)
    ids = {mark: tokenizer.token_to_id(mark) for mark in marks}
    call = ["f ", "<|constrain|>", "json", "<|message|>", "{}"]
    before = ["<|channel|>", "analysis", "<|message|>", "I call.", "<|end|>", "<|start|>", "assistant"]
    before += ["<|channel|>", "commentary to=functions."]

    async def script(request):
        kind = request.texts("guided_decoding_guide")[0]
        for part in call if "start: one" in kind else before + call:
            for token in [ids[part]] if part in ids else [byte + 3 for byte in part.encode()]:
                yield Row([token])
        yield Row([ids["<|call|>"]], finish_reason="stop")

    triton.script = script
    client = client_of(start(engine=engine, reasoning_format="harmony", tool_call_format="harmony"))
    for choice, reasoning in (("auto", "I call."), ("required", None)):
        ask = {"tools": [TOOL], "tool_choice": choice}
        for found, content, reason in answers(client, **ask):
            assert (found, content or None, reason) == (reasoning, None, "tool_calls")
        message = client.chat.completions.create(model="tiny", messages=HELLO, **ask).choices[0].message
        assert [(one.function.name, one.function.arguments) for one in message.tool_calls] == [("f", "{}")]
    prompt = triton.requests[-1].prompt
    assert prompt[-len(before[-1]) - 1] == ids["<|channel|>"], "the prompt begins the call"


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
