"""/v1/messages through Anthropic's official client, over a Triton that is told what to say."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from kvforge.common.refusals import QUEUE_FULL, Refusal
from kvforge.serving.contract.failures import Failure, failed
from tests.cpu.gateway.fake_triton import FakeTriton, Row, bytes_of
from tests.cpu.gateway.http_calls import WAIT_S, endless, wait_until

anthropic = pytest.importorskip("anthropic", reason="the dev extra installs Anthropic's client")

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{{ m.tool_call_id }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }}:{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "f", "description": "d", "input_schema": CITY},
    {"name": "g", "input_schema": {"type": "object", "properties": {}}},
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Zürich"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
THOUGHT = '<think>\nWho is "it"?\n</think>\n\n'


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("messages") / "template.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def url(start_shared: Callable[..., str], template: Path) -> str:
    return start_shared(chat_template=template, tool_call_format="hermes")


def client_of(url: str, **more: Any) -> "anthropic.Anthropic":
    more = {"api_key": "none", **more}
    return anthropic.Anthropic(base_url=url, max_retries=0, timeout=WAIT_S, **more)


@pytest.fixture(scope="module")
def client(url: str) -> "anthropic.Anthropic":
    return client_of(url)


def say(triton: FakeTriton, text: str, finish: str = "stop", stop_reason: Any = None) -> None:
    triton.script = lambda request: bytes_of(text + (" " if finish == "stop" else ""), request, finish, stop_reason)


def prompt_of(triton: FakeTriton, at: int = -1) -> str:
    return bytes(token - 3 for token in triton.requests[at].prompt).decode()


def inner_guide(triton: FakeTriton) -> dict[str, Any]:
    """What the latest answer is to keep to behind its reasoning."""
    request = triton.requests[-1]
    assert request.texts("guided_decoding_guide_type") == ["after_reasoning"]
    return json.loads(request.texts("guided_decoding_guide")[0])


def without_ids(message: Any) -> dict[str, Any]:
    """What two answers to the same request have in common, whichever way they came."""
    found = message.model_dump()
    found["id"] = ""
    for block in found["content"]:
        block.pop("parsed_output", None)
        if block["type"] == "tool_use":
            assert block["id"].startswith("toolu_")
            block["id"] = ""
    return found


def answers(client: "anthropic.Anthropic", **ask: Any) -> list[Any]:
    """The message, whole and as the client puts it together from a stream, which are the same."""
    ask = {"model": "tiny", "max_tokens": 500, "messages": HELLO, **ask}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert without_ids(streamed) == without_ids(whole)
    return [whole, streamed]


def blocks_of(message: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for block in message.content:
        if block.type == "text":
            found.append(("text", block.text))
        elif block.type == "thinking":
            found.append(("thinking", block.thinking))
        else:
            found.append((block.type, block.name, block.input))
    return found


def test_text(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    say(triton, 'héllo "you"')
    system = [{"type": "text", "text": "be"}, {"type": "text", "text": " kind", "cache_control": {"type": "ephemeral"}}]
    for answer in answers(
        client, system=system, stop_sequences=["X", "Y"], max_tokens=50,
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 7},
        metadata={"user_id": "me"}, cache_control={"type": "ephemeral"}, service_tier="auto",
        extra_headers={"anthropic-beta": "any-2026-01-01"},
    ):  # fmt: skip
        assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
        assert blocks_of(answer) == [("text", 'héllo "you"')] and answer.id.startswith("msg_")
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        prompt, num_tokens = "[system]be kind[user]hi[a]", len('héllo "you" '.encode())
        usage = answer.usage
        assert usage.cache_read_input_tokens == 16 and usage.cache_creation_input_tokens == 0
        assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt)
        assert usage.output_tokens == num_tokens
        assert prompt_of(triton) == prompt
    request = triton.requests[0]
    tensors = ("request_output_len", "temperature", "runtime_top_p", "runtime_top_k")
    assert [request.value(name) for name in tensors] == [50, 0.5, 0.25, 7]
    assert request.texts("stop_strings") == ["X", "Y"]


CASES = {
    "text": ("日本 😀", "stop", [("text", "日本 😀")], "end_turn"),
    "limit": ("half an ans", "length", [("text", "half an ans")], "max_tokens"),
    "thinking": (f"{THOUGHT}Grüße", "stop", [("thinking", 'Who is "it"?'), ("text", "Grüße")], "end_turn"),
    "only thinking": ("<think>still at", "length", [("thinking", "still at")], "max_tokens"),
    "call": (CALL, "stop", [("tool_use", "f", {"city": "Zürich"})], "tool_use"),
    "calls": (f"So:\n{CALL}\n{OTHER}", "stop",
              [("text", "So:"), ("tool_use", "f", {"city": "Zürich"}), ("tool_use", "g", {})], "tool_use"),
    "all": (f"{THOUGHT}So: {CALL}", "stop",
            [("thinking", 'Who is "it"?'), ("text", "So:"), ("tool_use", "f", {"city": "Zürich"})], "tool_use"),
    "a whole call at the limit": (CALL, "length", [("tool_use", "f", {"city": "Zürich"})], "max_tokens"),
    "a call without arguments yet": (CALL[: CALL.index('{"city') + 1], "length", [("tool_use", "f", {})], "max_tokens"),
    "markers": ("a <tool <think>b</think>", "stop", [("text", "a <tool <think>b</think>")], "end_turn"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_streamed_message_is_the_whole_one(client: "anthropic.Anthropic", triton: FakeTriton, case: str) -> None:
    text, finish, blocks, reason = CASES[case]
    say(triton, text, finish)
    for answer in answers(client, tools=TOOLS):
        assert (blocks_of(answer), answer.stop_reason) == (blocks, reason)


@pytest.mark.parametrize("seed", range(40))
def test_any_answer_in_any_pieces(client: "anthropic.Anthropic", triton: FakeTriton, seed: int) -> None:
    """Streamed as whole, and nothing of it lost."""
    rng = random.Random(seed)
    words = ["a", "é", "😀", "\n", '"', "\\", "{", "<", "<tool", "</think>", "<think>"]
    said, calls = "", list[str]()
    for _ in range(rng.randrange(1, 5)):
        if rng.random() < 0.4:
            name, arguments = rng.choice([("f", {"city": "".join(rng.choices(words, k=5))}), ("g", {})])
            call = {"name": name, "arguments": arguments}
            said += f"<tool_call>\n{json.dumps(call, ensure_ascii=rng.random() < 0.5)}\n</tool_call>"
            calls.append(json.dumps([name, arguments]))
        else:
            said += "".join(rng.choices(words, k=rng.randrange(1, 9)))
    thought = rng.random() < 0.5
    tokens = [byte + 3 for byte in (f"{THOUGHT}{said} " if thought else f"x{said} ").encode()]
    cuts = sorted(rng.sample(range(1, len(tokens)), min(5, len(tokens) - 1)))

    async def script(request):
        for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            yield Row(tokens[start:end], finish_reason="stop" if end == len(tokens) else "", reused_blocks=1)

    triton.script = script
    for answer in answers(client, tools=TOOLS):
        blocks = blocks_of(answer)
        assert [json.dumps(block[1:]) for block in blocks if block[0] == "tool_use"] == calls
        assert [block[1] for block in blocks if block[0] == "thinking"] == (['Who is "it"?'] if thought else [])
        assert answer.stop_reason == ("tool_use" if calls else "end_turn")


def test_an_empty_answer(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    async def script(request):
        yield Row([2], finish_reason="stop", reused_blocks=0)

    triton.script = script
    for answer in answers(client):
        assert (answer.content, answer.stop_reason, answer.usage.output_tokens) == ([], "end_turn", 1)
        assert client.messages.create(
            model="tiny", max_tokens=5, messages=[*HELLO, answer.to_param(), *HELLO]
        ).content == []  # fmt: skip
    assert prompt_of(triton) == "[user]hi[assistant][user]hi[a]"


def test_events(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    """In the order that the client's accumulator needs, each block begun and ended under its index."""
    say(triton, f"{THOUGHT}So: {CALL}{OTHER}")
    raw = client.messages.create(model="tiny", max_tokens=500, messages=HELLO, tools=TOOLS, stream=True)
    events = list(raw)
    kinds: list[Any] = []
    for event in events:
        kind = (event.type, getattr(event, "index", None), getattr(getattr(event, "delta", None), "type", None))
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    delta, start, stop = "content_block_delta", "content_block_start", "content_block_stop"
    assert kinds == [
        ("message_start", None, None),
        (start, 0, None), (delta, 0, "thinking_delta"), (delta, 0, "signature_delta"), (stop, 0, None),
        (start, 1, None), (delta, 1, "text_delta"), (stop, 1, None),
        (start, 2, None), (delta, 2, "input_json_delta"), (stop, 2, None),
        (start, 3, None), (delta, 3, "input_json_delta"), (stop, 3, None),
        ("message_delta", None, None), ("message_stop", None, None),
    ]  # fmt: skip
    begun = events[0].message
    assert (begun.content, begun.stop_reason, begun.usage.output_tokens) == ([], None, 0)
    pieces = [event.delta.partial_json for event in events if event.type == delta and event.index == 2]
    assert len(pieces) > 5 and json.loads("".join(pieces)) == {"city": "Zürich"}


def test_pings_and_the_names_of_events(url: str, triton: FakeTriton) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": HELLO, "stream": True}
    with client_of(url).messages.with_streaming_response.create(**body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    assert names == [json.loads(line.removeprefix("data: "))["type"] for line in lines[1::2]]
    assert names[:2] == ["message_start", "ping"] and names[-2:] == ["message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("text", "stop_reason", "tools", "reason", "sequence"),
    [
        ("so far", "X", (), "stop_sequence", "X"),
        ("so far", ["X"], (), "stop_sequence", "X"),
        ("so far", 7, (), "end_turn", None),
        (CALL, "X", TOOLS, "tool_use", None),
        (CALL[:42], "X", TOOLS, "stop_sequence", "X"),
    ],
)
def test_why_it_stops(
    client: "anthropic.Anthropic", triton: FakeTriton, text, stop_reason, tools, reason, sequence
) -> None:
    triton.script = lambda request: bytes_of(text, request, "stop", stop_reason)
    ask = {"model": "tiny", "max_tokens": 500, "messages": HELLO, "tools": tools, "stop_sequences": ["X"]}
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for answer in (client.messages.create(**ask), streamed):
        assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


def test_more_than_the_context_holds_fills_it(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    num_prompt = len("[user]hi[a]")
    say(triton, "x" * (4096 - num_prompt), "length")
    for answer in answers(client, max_tokens=4096):
        assert answer.stop_reason == "model_context_window_exceeded"
        assert triton.requests[-1].value("request_output_len") == 4096 - num_prompt
    say(triton, "x", "length")
    for answer in answers(client, max_tokens=4096 - num_prompt):
        assert answer.stop_reason == "max_tokens"


def test_tools_there_and_back(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    """The answer's blocks go back as they are, with the results of the calls."""
    say(triton, f"{THOUGHT}So: {CALL}{OTHER}")
    first = client.messages.create(model="tiny", max_tokens=500, messages=HELLO, tools=TOOLS)
    calls = [block for block in first.content if block.type == "tool_use"]
    results: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": "no such", "is_error": True},
        {"type": "text", "text": "and?"},
    ]
    say(triton, "Wet.")
    messages = [*HELLO, first.to_param(), {"role": "user", "content": results}]
    answer = client.messages.create(model="tiny", max_tokens=500, messages=messages, tools=TOOLS)
    assert blocks_of(answer) == [("text", "Wet.")]
    f, g = '{"name": "f", "arguments": {"city": "Zürich"}}', '{"name": "g", "arguments": {}}'
    shown = prompt_of(triton)
    assert shown[shown.index("[user]") :] == (
        f'[user]hi[assistant]<think>Who is "it"?</think>So:<tool_call>{calls[0].id}:{f}<tool_call>{calls[1].id}:{g}'
        f"[tool]rain{calls[0].id}[tool]Error: no such{calls[1].id}[user]and?[a]"
    )
    functions = [json.loads(part) for part in shown[: shown.index("[user]")].replace("}{", "}\n{").splitlines()]
    assert [entry["function"]["name"] for entry in functions] == ["f", "g"]
    assert functions[0]["function"]["parameters"] == CITY


@pytest.mark.parametrize(("choice", "names"), [({"type": "any"}, "fg"), ({"type": "tool", "name": "g"}, "g")])
def test_forced_calls(client: "anthropic.Anthropic", triton: FakeTriton, choice: dict, names: str) -> None:
    """The guide begins them, behind what the model thinks."""
    say(triton, f"{THOUGHT}{OTHER}")
    for answer in answers(client, tools=TOOLS, tool_choice=choice):
        assert blocks_of(answer) == [("thinking", 'Who is "it"?'), ("tool_use", "g", {})]
        assert answer.stop_reason == "tool_use"
    assert set(json.loads(inner_guide(triton)["guide"])["$defs"]) == set(names)


def test_no_calls_and_one_call(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    say(triton, f"{CALL}{OTHER}")
    for answer in answers(client, tools=TOOLS, tool_choice={"type": "none"}):
        assert blocks_of(answer) == [("text", f"{CALL}{OTHER}")] and answer.stop_reason == "end_turn"
    for answer in answers(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}):
        assert blocks_of(answer) == [("tool_use", "f", {"city": "Zürich"})]


@pytest.mark.parametrize(
    ("thinking", "end"),
    [
        ({}, "[a]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "[a]<think>\n"),
        ({"thinking": {"type": "adaptive"}}, "[a]<think>\n"),
        ({"thinking": {"type": "disabled"}}, "[a]<think></think>"),
    ],
)
def test_thinking_is_what_the_template_is_told(
    client: "anthropic.Anthropic", triton: FakeTriton, thinking: dict, end: str
) -> None:
    say(triton, "so it is\n</think>\n\nYes")
    wanted = [("thinking", "so it is"), ("text", "Yes")] if end.endswith("\n") else None
    for answer in answers(client, max_tokens=2000, **thinking):
        assert wanted is None or blocks_of(answer) == wanted
    assert prompt_of(triton).endswith(f"[user]hi{end}")


def test_thinking_that_is_omitted(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    say(triton, "so it is</think>Yes")
    for answer in answers(client, thinking={"type": "adaptive", "display": "omitted"}):
        assert blocks_of(answer) == [("thinking", ""), ("text", "Yes")] and answer.content[0].signature
        assert answer.usage.output_tokens == len("so it is</think>Yes ")


def test_the_assistants_last_word_is_gone_on_with(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    say(triton, "42")
    messages = [*HELLO, {"role": "assistant", "content": "The answer is "}]
    for answer in answers(client, messages=messages):
        assert blocks_of(answer) == [("text", "42")]
    assert prompt_of(triton) == "[user]hi[assistant]The answer is "


class Person(BaseModel):
    age: int


def test_a_form_of_the_text(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    say(triton, '{"age": 5}')
    answer = client.messages.parse(model="tiny", max_tokens=50, messages=HELLO, output_format=Person)
    assert answer.parsed_output == Person(age=5)
    guide = inner_guide(triton)
    assert guide["kind"] == "json_schema"
    assert json.loads(guide["guide"])["properties"]["age"]["type"] == "integer"


def test_count_tokens(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    """What is counted is what the same request then has, and nothing is generated for it."""
    ask = {
        "model": "tiny", "messages": HELLO, "system": "be", "tools": TOOLS, "tool_choice": {"type": "any"},
        "thinking": {"type": "disabled"},
    }  # fmt: skip
    counted = client.messages.count_tokens(**ask).input_tokens
    assert triton.requests == []
    say(triton, OTHER.removeprefix("<tool_call>\n"))
    usage = client.messages.create(**ask, max_tokens=50).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens == len(triton.requests[0].prompt)
    assert counted > client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens


def test_more_tokens_than_fit_are_counted(client: "anthropic.Anthropic") -> None:
    """So a client learns by how much a conversation is too long."""
    long = [{"role": "user", "content": "x" * 5000}]
    assert client.messages.count_tokens(model="tiny", messages=long).input_tokens == 5000 + len("[user][a]")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 'messages' has 5009 tokens"):
        client.messages.create(model="tiny", max_tokens=5, messages=long)


def test_an_agent_finishes_its_task(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    """The client's own loop: two calls of different tools, each with the result of the one before, then the answer."""
    steps = ['{"name": "locate", "arguments": {"name": "me"}}', '{"name": "weather", "arguments": {"city": "Bern"}}']

    def script(request):
        done = bytes(token - 3 for token in request.prompt).decode().count("[tool]")
        text = f"<tool_call>\n{steps[done]}\n</tool_call> " if done < len(steps) else "It rains. "
        return bytes_of(text, request, "stop")

    called: list[str] = []

    @anthropic.beta_tool
    def locate(name: str) -> str:
        """Where somebody is."""
        called.append(name)
        return "Bern"

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "rain"

    triton.script = script
    for stream in (False, True):
        called.clear()
        runner = client.beta.messages.tool_runner(
            model="tiny", max_tokens=200, messages=HELLO, tools=[locate, weather], stream=stream
        )
        final = None
        for step in runner:
            final = step.get_final_message() if stream else step
        assert called == ["me", "Bern"] and blocks_of(final) == [("text", "It rains.")]
    assert "[tool]Bern" in prompt_of(triton) and "[tool]rain" in prompt_of(triton)


def test_models(client: "anthropic.Anthropic") -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.max_input_tokens) == ("tiny", "model", 4096)
    assert client.models.retrieve("tiny") == model
    with pytest.raises(anthropic.NotFoundError, match="the model 'large' does not exist"):
        client.models.retrieve("large")


def test_several_names(start: Callable[..., str], template: Path, triton: FakeTriton) -> None:
    client = client_of(start(chat_template=template, model_names=("small", "claude-x")))
    page = client.models.list()
    assert ([model.id for model in page], page.first_id, page.last_id) == (["small", "claude-x"], "small", "claude-x")
    for name in ("small", "claude-x"):
        for answer in answers(client, model=name):
            assert answer.model == name


def test_the_asynchronous_client(url: str, triton: FakeTriton) -> None:
    say(triton, f"{THOUGHT}{CALL}")

    async def run() -> list[Any]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            ask = {"model": "tiny", "max_tokens": 500, "messages": HELLO, "tools": TOOLS}
            async with client.messages.stream(**ask) as stream:
                return [await client.messages.create(**ask), await stream.get_final_message()]

    whole, streamed = asyncio.run(run())
    assert without_ids(whole) == without_ids(streamed)


def test_keys(start: Callable[..., str], template: Path, triton: FakeTriton, tmp_path: Path) -> None:
    """As a bearer's token; older clients send the header x-api-key."""
    (tmp_path / "keys").write_text("secret\n")
    url = start(api_key_file=tmp_path / "keys", chat_template=template)
    ask = {"model": "tiny", "max_tokens": 5, "messages": HELLO}
    for shown in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
        assert client_of(url, **shown).messages.create(**ask).content
    wrong = client_of(url, api_key="wrong", default_headers={"x-api-key": "secret"})
    assert wrong.messages.create(**ask).content
    for shown in ({"api_key": "secre"}, {"api_key": None, "auth_token": "secrets"}):
        with pytest.raises(anthropic.AuthenticationError, match="key is missing or wrong") as found:
            client_of(url, **shown).messages.create(**ask)
        check(found.value, "authentication_error")
        with pytest.raises(anthropic.AuthenticationError):
            client_of(url, **shown).models.list()


def check(error: Any, kind: str, words: str = "") -> None:
    """An error as Anthropic writes it, with an id to ask after."""
    body = error.body
    assert set(body) == {"type", "error", "request_id"} and set(body["error"]) - {"details"} == {"type", "message"}
    assert (body["type"], body["error"]["type"]) == ("error", kind) and words in body["error"]["message"]
    assert error.request_id == body["request_id"] == error.response.headers["x-request-id"]


ERRORS = [
    (failed("refused", Refusal("holds too much", field="stop")), "BadRequestError", "invalid_request_error"),
    (failed("unavailable", Refusal("the queue is full", code=QUEUE_FULL)), "RateLimitError", "rate_limit_error"),
    (Failure("unavailable", "no"), "OverloadedError", "overloaded_error"),
    (Failure("lost", "the engine process ended"), "OverloadedError", "overloaded_error"),
    (Failure("deadline", "passed"), "GatewayTimeoutError", "timeout_error"),
    (Failure("failed", "broken"), "InternalServerError", "api_error"),
    (Failure("triton", "unknown model"), "OverloadedError", "overloaded_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("failure", "raised", "kind"), ERRORS)
def test_errors_of_the_engine(
    client: "anthropic.Anthropic", triton: FakeTriton, failure: Failure, raised: str, kind: str, stream: bool
) -> None:
    async def refuse(request):
        yield failure

    triton.script = refuse
    with pytest.raises(getattr(anthropic, raised)) as found:
        list(client.messages.create(model="tiny", max_tokens=5, messages=HELLO, stream=stream))
    check(found.value, kind, "'stop_sequences'" if kind == "invalid_request_error" else "")
    if kind in ("rate_limit_error", "overloaded_error"):
        assert found.value.response.headers["retry-after"] == "1"


def test_an_error_within_a_stream(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    async def break_off(request):
        yield Row([100])
        yield Failure("lost", "the engine process ended")

    triton.script = break_off
    events: list[str] = []
    with pytest.raises(anthropic.APIStatusError) as found:
        for event in client.messages.create(model="tiny", max_tokens=5, messages=HELLO, stream=True):
            events.append(event.type)
    check(found.value, "overloaded_error", "has ended")
    assert events[:2] == ["message_start", "content_block_start"] and "message_stop" not in events


def test_errors_of_the_gateway(
    client: "anthropic.Anthropic", start: Callable[..., str], template: Path, triton: FakeTriton
) -> None:
    ask = {"model": "tiny", "max_tokens": 5, "messages": HELLO}
    with pytest.raises(anthropic.NotFoundError, match="the model 'claude' does not exist") as missing:
        client.messages.create(**{**ask, "model": "claude"})
    check(missing.value, "not_found_error")
    with pytest.raises(anthropic.NotFoundError, match="nothing at /v1/messages/batches") as nothing:
        client.messages.batches.list()
    check(nothing.value, "not_found_error")
    small = client_of(start(chat_template=template, max_body_bytes=1000, max_requests=1))
    with pytest.raises(anthropic.ContentTooLargeError) as large:
        small.messages.create(**{**ask, "messages": [{"role": "user", "content": "x" * 1000}]})
    check(large.value, "request_too_large")
    triton.script = endless()
    with small.messages.stream(**ask) as stream:
        next(iter(stream))
        with pytest.raises(anthropic.RateLimitError) as busy:
            small.messages.create(**ask)
        check(busy.value, "rate_limit_error")
    wait_until(lambda: triton.requests[-1].cancelled)


def test_what_no_guide_keeps_is_said(client: "anthropic.Anthropic", triton: FakeTriton) -> None:
    say(triton, OTHER)
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x)"}}}
    ask = {
        "model": "tiny",
        "max_tokens": 50,
        "messages": HELLO,
        "tools": [TOOLS[1], {"name": "f", "input_schema": schema}],
    }
    for stream in (False, True):
        answer = client.messages.with_raw_response.create(**ask, stream=stream)
        assert json.loads(answer.headers["x-kvforge-unguided"]) == {"f": ["pattern"]}
