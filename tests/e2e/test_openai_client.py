"""The official client against a real server: the gateway says what the engine says offline, in OpenAI's words."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from lm_eval.models.openai_completions import LocalCompletionsAPI

from kvforge import LLM
from kvforge.evaluation.lm_harness import EngineLM
from kvforge.runtime import SamplingParams
from kvforge.serving.server.launcher import TritonServer
from tests.support.serving.gateway_process import MODEL, run_gateway
from tests.support.serving.server import ENDLESS, used_pages, wait_until

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
PROMPTS = ["Once upon a time", "naïve 😀", "x"]
SAMPLED = {"temperature": 0.75, "top_p": 0.875, "seed": 11}


@pytest.fixture(scope="module")
def gateway(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway in front of the server, with a key."""
    folder: Path = tmp_path_factory.mktemp("openai")
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "keys").write_text("secret\n")
    with run_gateway(
        server, folder, chat_template=folder / "template.jinja", api_key_file=folder / "keys", exit_with_parent=True
    ) as running:
        yield f"{running.url}/v1"


@pytest.fixture(scope="module")
def client(gateway: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway, api_key="secret", max_retries=0, timeout=180)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_completions_are_those_of_the_engine_offline(
    client: openai.OpenAI, llm: LLM, sampling: dict, stream: bool
) -> None:
    expected = llm.generate(PROMPTS, SamplingParams(max_tokens=24, n=2, logprobs=3, **sampling), use_tqdm=False)
    ask = {"model": MODEL, "prompt": PROMPTS, "max_tokens": 24, "n": 2, "logprobs": 3, **sampling}
    texts, logprobs = [""] * 6, [[] for _ in range(6)]
    reasons, usage = [None] * 6, None
    answers = (
        client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        if stream
        else [client.completions.create(**ask)]
    )
    for answer in answers:
        usage = answer.usage or usage
        for choice in answer.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs:
                logprobs[choice.index] += zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True)
    completions = [completion for output in expected for completion in output.outputs]
    assert texts == [completion.text for completion in completions]
    assert reasons == [completion.finish_reason for completion in completions]
    assert usage.completion_tokens == sum(len(completion.token_ids) for completion in completions)
    assert usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in expected)
    for found, completion in zip(logprobs, completions, strict=True):
        assert [value for value, _ in found] == pytest.approx([entry.logprob for entry in completion.logprobs])
        for (_, top), entry in zip(found, completion.logprobs, strict=True):
            values = {**entry.top, entry.token_id: entry.logprob}.values()
            assert sorted(top.values()) == pytest.approx(sorted(values))


@pytest.mark.parametrize("stream", [False, True])
def test_chat(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]
    ids = llm.tokenizer.encode("<system>be<user>hello<a>", add_special_tokens=False)
    params = SamplingParams(max_tokens=20, logprobs=2, **SAMPLED)
    (expected,) = llm.generate([ids], params, use_tqdm=False)[0].outputs
    ask = {"model": MODEL, "messages": messages, "max_completion_tokens": 20, "logprobs": True, "top_logprobs": 2}
    text, entries = "", []
    if stream:
        for chunk in client.chat.completions.create(**ask, **SAMPLED, stream=True):
            (choice,) = chunk.choices
            text += choice.delta.content or ""
            entries += choice.logprobs.content if choice.logprobs else []
    else:
        (choice,) = client.chat.completions.create(**ask, **SAMPLED).choices
        text, entries = choice.message.content, choice.logprobs.content
    assert (text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in expected.logprobs])
    tokens = b"".join(bytes(entry.bytes) for entry in entries)
    assert tokens.decode(errors="replace").startswith(expected.text[:1])
    for entry, known in zip(entries, expected.logprobs, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(list(known.top.values()))


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    params = SamplingParams(max_tokens=64, temperature=0.0)
    whole = llm.generate(["tell me"], params, use_tqdm=False)[0].outputs[0].text
    middle = next(at for at in range(5, len(whole) - 3) if "\ufffd" not in whole[at : at + 3])
    stop = whole[middle : middle + 3]
    answers = client.completions.create(
        model=MODEL, prompt="tell me", max_tokens=64, temperature=0, stop=[stop, "never"], stream=stream
    )
    chunks = list(answers) if stream else [answers]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].stop_reason == stop


def test_logit_bias_and_stop_tokens(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "prompt": "x", "max_tokens": 8, "temperature": 0, "logit_bias": {str(ord("q") + 3): 100}}
    assert client.completions.create(**ask).choices[0].text == "q" * 8
    choice = client.completions.create(**ask, extra_body={"stop_token_ids": [ord("q") + 3]}).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", ord("q") + 3)


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}


def test_json_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "?"}], response_format=form, n=2, seed=3,
        logit_bias={str(ord(blank) + 3): -100 for blank in " \n\t\r"},
    )  # fmt: skip
    for choice in answer.choices:
        value = json.loads(choice.message.content)
        assert set(value) == {"ok", "size"} and isinstance(value["ok"], bool) and value["size"] in ("small", "large")
        assert choice.finish_reason == "stop"


def test_regex_and_choice(client: openai.OpenAI) -> None:
    for form, allowed in (({"regex": "a{3}"}, {"aaa"}), ({"choice": ["yes.", "no"]}, {"yes.", "no"})):
        answer = client.completions.create(
            model=MODEL, prompt="x", seed=1, n=4, extra_body={"structured_outputs": form}
        )
        assert {choice.text for choice in answer.choices} <= allowed


def test_guides_that_cannot_be_used(client: openai.OpenAI) -> None:
    for form in ({"regex": "(a"}, {"json": {"type": "nonsense"}}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt="x", extra_body={"structured_outputs": form})


def test_closing_a_stream_frees_the_pages(client: openai.OpenAI, server: TritonServer) -> None:
    wait_until(lambda: used_pages(server) == 0, "a quiet server")
    ask = {"model": MODEL, "prompt": ["x", "y"], "max_tokens": ENDLESS, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**ask, stream=True) as stream:
        next(iter(stream))
        wait_until(lambda: used_pages(server) > 0, "the request runs")
    wait_until(lambda: used_pages(server) == 0, "pages free")


def test_going_away_without_a_stream_frees_the_pages(gateway: str, server: TritonServer) -> None:
    wait_until(lambda: used_pages(server) == 0, "a quiet server")
    host = gateway.split("/")[2]
    connection = http.client.HTTPConnection(host)
    body = {"model": MODEL, "prompt": "x", "max_tokens": ENDLESS, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Authorization": "Bearer secret"})
    wait_until(lambda: used_pages(server) > 0, "the request runs")
    connection.close()
    wait_until(lambda: used_pages(server) == 0, "pages free")


def test_errors(gateway: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=gateway, api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="takes at most"):
        client.completions.create(model=MODEL, prompt="x" * 70000)
    with pytest.raises(openai.BadRequestError, match="--tool-call-format"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )  # fmt: skip
    with pytest.raises(openai.NotFoundError, match="generates text"):
        client.embeddings.create(model=MODEL, input="x")


def test_cached_tokens(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "prompt": "the same beginning " * 10, "max_tokens": 4}
    client.completions.create(**ask)
    usage = client.completions.create(**ask).usage
    assert 16 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_many_at_once(client: openai.OpenAI, llm: LLM) -> None:
    prompts = [f"{index} bottles" for index in range(24)]
    params = SamplingParams(max_tokens=12, temperature=0.0)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        chunks = client.completions.create(
            model=MODEL, prompt=prompts[index], max_tokens=12, temperature=0, stream=True
        )
        found[index] = "".join(chunk.choices[0].text for chunk in chunks)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(24)] == expected


LETTERS = [ord(char) + 3 for char in " eq"]


@pytest.mark.parametrize(
    "more",
    [
        {"stop_token_ids": LETTERS},
        {"stop_token_ids": LETTERS, "min_tokens": 6},
        {"stop_token_ids": LETTERS, "ignore_eos": True, "min_tokens": 3},
        {"stop_token_ids": LETTERS[:1], "ignore_eos": True},
        {"ignore_eos": True},
    ],
    ids=["stops", "late", "late-without-eos", "one-without-eos", "without-eos"],
)
@pytest.mark.parametrize("regex", [None, "[a-z]{2,30}", "(ab|[e-z ]){1,30}"])
def test_stop_tokens_are_those_of_the_engine_offline(
    client: openai.OpenAI, llm: LLM, guided_logprobs: bool, more: dict, regex: str | None
) -> None:
    """With a guide, too, which lets them in only where its text may end."""
    guide = {} if regex is None else {"guided_decoding": {"kind": "regex", "guide": regex}}
    params = SamplingParams(max_tokens=24, n=8, temperature=1.0, seed=3, **more, **guide)
    completions = llm.generate(["x"], params, use_tqdm=False)[0].outputs
    ask = {**more, **({} if regex is None else {"guided_regex": regex})}
    if regex is None or guided_logprobs:
        ask["logprobs"] = 0
    answer = client.completions.create(
        model=MODEL, prompt="x", max_tokens=24, n=8, temperature=1.0, seed=3, extra_body=ask
    )
    for choice, completion in zip(answer.choices, completions, strict=True):
        assert "logprobs" not in ask or len(choice.logprobs.tokens) == len(completion.token_ids)
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (
            completion.text, completion.finish_reason, completion.stop_reason,
        )  # fmt: skip


TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call> with arguments{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"hot": {"type": "boolean"}, "unit": {"enum": ["C", "F"]}},
                "required": ["hot", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "set_size",
            "parameters": {
                "type": "object",
                "properties": {"size": {"$ref": "#/$defs/Size"}},
                "required": ["size"],
                "additionalProperties": False,
                "$defs": {"Size": {"enum": [1, 2, 3]}},
            },
            "strict": True,
        },
    },
]
NO_BLANKS = {str(ord(blank) + 3): -100 for blank in "\t\r"}
ASK = [{"role": "user", "content": "?"}]


@pytest.fixture(scope="module", params=["hermes", "llama3_json", "mistral"])
def tool_client(server: TritonServer, tmp_path_factory: pytest.TempPathFactory, request) -> Iterator[openai.OpenAI]:
    folder: Path = tmp_path_factory.mktemp("tools")
    (folder / "template.jinja").write_text(TOOL_TEMPLATE)
    with run_gateway(
        server, folder, chat_template=folder / "template.jinja", tool_call_format=request.param, exit_with_parent=True
    ) as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=180)


def check_call(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "get_weather":
        assert set(value) == {"hot", "unit"} and isinstance(value["hot"], bool) and value["unit"] in ("C", "F")
    else:
        assert name == "set_size" and value["size"] in (1, 2, 3) and len(value) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_size"}}])
def test_forced_calls(tool_client: openai.OpenAI, guided_logprobs: bool, choice) -> None:
    ask = {"model": MODEL, "messages": ASK, "tools": TOOLS, "tool_choice": choice, "max_completion_tokens": 2000}
    answer = tool_client.chat.completions.create(
        **ask, n=3, seed=5, logit_bias=NO_BLANKS, parallel_tool_calls=False, logprobs=guided_logprobs
    )
    for entry in answer.choices:
        assert entry.message.content is None and entry.finish_reason == "tool_calls"
        (call,) = entry.message.tool_calls
        assert call.id.startswith("call_") and call.type == "function"
        assert choice == "required" or call.function.name == "set_size"
        check_call(call.function.name, call.function.arguments)
        assert entry.logprobs.content if guided_logprobs else entry.logprobs is None
    with tool_client.chat.completions.stream(**ask, seed=5, logit_bias=NO_BLANKS, parallel_tool_calls=False) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == (None, "tool_calls")
    known = answer.choices[0].message.tool_calls[0].function
    (call,) = final.message.tool_calls
    assert (call.function.name, call.function.arguments) == (known.name, known.arguments)


def test_free_answers_with_tools(tool_client: openai.OpenAI) -> None:
    """The model may say anything; what it says as a call would keep to the schema."""
    ask = {"model": MODEL, "messages": ASK, "tools": TOOLS, "max_completion_tokens": 40, "seed": 3}
    for found in tool_client.chat.completions.create(**ask, n=2).choices:
        assert found.message.content and not found.message.tool_calls and found.finish_reason in ("length", "stop")
    chunks = list(tool_client.chat.completions.create(**ask, stream=True))
    whole = tool_client.chat.completions.create(**ask).choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_several_calls_and_a_conversation_with_them(tool_client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "tools": TOOLS, "tool_choice": "required", "logit_bias": NO_BLANKS}
    message = tool_client.chat.completions.create(**ask, messages=ASK, seed=1).choices[0].message
    assert message.tool_calls
    for call in message.tool_calls:
        check_call(call.function.name, call.function.arguments)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls]
    again = tool_client.chat.completions.create(**ask, messages=[*ASK, message, *results], seed=2).choices[0]
    assert again.finish_reason == "tool_calls"


def test_schemas_that_no_guide_takes(tool_client: openai.OpenAI) -> None:
    """What cannot be kept is left to the model, which the answer's header says; with `strict` it is refused."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(("}}}
    function = {"name": "f", "parameters": parameters}
    ask = {"model": MODEL, "messages": ASK, "max_tokens": 16, "temperature": 0.0}
    for choice in ("auto", "required"):
        tools = [{"type": "function", "function": function}]
        raw = tool_client.chat.completions.with_raw_response.create(**ask, tools=tools, tool_choice=choice)
        assert json.loads(raw.headers["x-kvforge-unguided"]) == {"f": ["pattern"]}
        assert raw.parse().usage.completion_tokens > 0
        strict = [{"type": "function", "function": function | {"strict": True}}]
        with pytest.raises(openai.BadRequestError, match="'f', which is strict, and pattern cannot be kept"):
            tool_client.chat.completions.create(**ask, tools=strict, tool_choice=choice)


def test_responses(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode("<system>be<user>hello<a>", add_special_tokens=False)
    (expected,) = llm.generate([ids], SamplingParams(max_tokens=20, **SAMPLED), use_tqdm=False)[0].outputs
    ask = {"model": MODEL, "instructions": "be", "input": "hello", "max_output_tokens": 20, "temperature": 0.75,
           "top_p": 0.875, "extra_body": {"seed": 11}}  # fmt: skip
    whole = client.responses.create(**ask)
    assert (whole.output_text, whole.usage.input_tokens) == (expected.text, len(ids))
    assert whole.status == ("incomplete" if expected.finish_reason == "length" else "completed")
    events = list(client.responses.create(**ask, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    assert events[-1].response.output_text == expected.text


def test_responses_with_calls(tool_client: openai.OpenAI) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    ask = {"model": MODEL, "input": "?", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False,
           "extra_body": {"seed": 2, "logit_bias": NO_BLANKS}}  # fmt: skip
    (item,) = tool_client.responses.create(**ask).output
    check_call(item.name, item.arguments)
    with tool_client.responses.stream(**ask) as stream:
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (item.name, item.arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_prompts_are_those_of_the_engine_offline(
    client: openai.OpenAI, llm: LLM, stream: bool
) -> None:
    """Several times, as a prefix that is kept must not take their place; with text and with token ids."""
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=2, prompt_logprobs=2)
    prompts = [list(range(5, 5 + length)) for length in (1, 2, 40, 300)]
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        ask = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "logprobs": 2, "echo": True}
        for _ in range(2):
            parts = client.completions.create(**ask, stream=True) if stream else [client.completions.create(**ask)]
            found = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs]
            values = [value for each in found for value in each.token_logprobs]
            entries = [*output.prompt_logprobs, *output.outputs[0].logprobs]
            assert values[0] is None
            assert values[1:] == pytest.approx([entry.logprob for entry in entries[1:]])


def test_an_evaluation_through_the_api_is_that_of_the_engine(gateway: str, engine_dir: Path) -> None:
    """lm-evaluation-harness's own client of completions, and its numbers of the same engine in process."""
    harness = LocalCompletionsAPI(
        base_url=f"{gateway}/completions",
        model=MODEL,
        tokenizer=str(engine_dir / "tokenizer"),
        tokenized_requests=True,
        header={"Authorization": "Bearer secret"},
        batch_size=4,
        max_length=1000,
    )
    engine = EngineLM(engine_dir, max_length=1000, kv_cache_gib=0.125)
    ids = [([5, 6, 7], [8]), ([9] * 300, [10, 11, 12]), ([40, 41], [42] * 50), ([7], [engine_top(engine, [7])])]
    requests = [(("", ""), context, continuation) for context, continuation in ids]
    served = harness._loglikelihood_tokens(requests, disable_tqdm=True)
    offline = engine._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [value for value, _ in served] == pytest.approx([value for value, _ in offline])
    assert [is_top for _, is_top in served] == [is_top for _, is_top in offline]
    assert served[3][1]


def engine_top(engine: EngineLM, prompt: list[int]) -> int:
    """The token that the engine would generate."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    return engine.llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids[0]
