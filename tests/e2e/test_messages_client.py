"""Anthropic's official client against a real server: the engine's own text, and calls that its guides hold to."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvforge import LLM
from kvforge.runtime import SamplingParams
from kvforge.serving.server.launcher import TritonServer
from tests.e2e.test_openai_client import NO_BLANKS, TOOL_TEMPLATE, TOOLS, check_call
from tests.support.serving.gateway_process import MODEL, run_gateway

anthropic = pytest.importorskip("anthropic", reason="the dev extra installs Anthropic's client")

OWN_TOOLS = [
    {**{key: value for key, value in tool["function"].items() if key != "parameters"},
     "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]  # fmt: skip
ASK = [{"role": "user", "content": "?"}]
SAMPLED = {"temperature": 0.75, "top_p": 0.875, "seed": 11}


@pytest.fixture(scope="module")
def client(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator["anthropic.Anthropic"]:
    folder: Path = tmp_path_factory.mktemp("messages")
    (folder / "template.jinja").write_text(TOOL_TEMPLATE)
    (folder / "keys").write_text("secret\n")
    with run_gateway(
        server, folder, chat_template=folder / "template.jinja", tool_call_format="hermes",
        api_key_file=folder / "keys", exit_with_parent=True,
    ) as running:  # fmt: skip
        yield anthropic.Anthropic(base_url=running.url, api_key="secret", max_retries=0, timeout=180)


def answers(client: "anthropic.Anthropic", **ask: Any) -> list[Any]:
    """The message, whole and put together from a stream."""
    with client.messages.stream(model=MODEL, **ask) as stream:
        streamed = stream.get_final_message()
    return [client.messages.create(model=MODEL, **ask), streamed]


def prompt_of(client: "anthropic.Anthropic", **ask: Any) -> list[int]:
    """The tokens of a conversation, from the same gateway."""
    found = client.post("/tokenize", body={"messages": ask["messages"]}, cast_to=dict[str, Any])
    assert found["count"] == client.messages.count_tokens(model=MODEL, **ask).input_tokens
    return found["tokens"]


def test_a_message_is_what_the_engine_says_offline(client: "anthropic.Anthropic", llm: LLM) -> None:
    ids = prompt_of(client, messages=ASK)
    (expected,) = llm.generate([ids], SamplingParams(max_tokens=20, **SAMPLED), use_tqdm=False)[0].outputs
    for message in answers(client, max_tokens=20, messages=ASK, extra_body=SAMPLED):
        assert "".join(block.text for block in message.content) == expected.text
        assert message.stop_reason == ("max_tokens" if expected.finish_reason == "length" else "end_turn")
        usage = message.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == len(ids)
        assert usage.output_tokens == len(expected.token_ids)


def test_a_stop_sequence(client: "anthropic.Anthropic", llm: LLM) -> None:
    greedy = {"extra_body": {"temperature": 0.0}}
    whole = client.messages.create(model=MODEL, max_tokens=40, messages=ASK, **greedy).content[0].text
    middle = next(at for at in range(5, len(whole) - 3) if "\ufffd" not in whole[at : at + 3])
    stop = whole[middle : middle + 3]
    for message in answers(client, max_tokens=40, messages=ASK, stop_sequences=[stop, "never"], **greedy):
        assert message.content[0].text == whole[: whole.index(stop)]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_three_steps_of_an_agent(client: "anthropic.Anthropic") -> None:
    """Two calls that the guide holds to their schemas, each with its result sent back, then an answer."""
    messages: list[Any] = [*ASK]
    more: dict[str, Any] = {"tools": OWN_TOOLS, "max_tokens": 400}
    for step, name in enumerate(("get_weather", "set_size")):
        choice = {"type": "tool", "name": name, "disable_parallel_tool_use": True}
        ask = {**more, "messages": messages, "tool_choice": choice}
        found = answers(client, **ask, extra_body={"seed": step, "logit_bias": NO_BLANKS})
        for message in found:
            (call,) = message.content
            assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", name)
            check_call(call.name, json.dumps(call.input))
        assert found[0].content[0].input == found[1].content[0].input
        result = {"type": "tool_result", "tool_use_id": found[0].content[0].id, "content": "ok"}
        messages += [found[0].to_param(), {"role": "user", "content": [result]}]
    end = client.messages.create(model=MODEL, **more, messages=messages, tool_choice={"type": "none"})
    assert end.stop_reason in ("max_tokens", "end_turn") and all(block.type == "text" for block in end.content)


def test_a_wrong_key(client: "anthropic.Anthropic") -> None:
    with pytest.raises(anthropic.AuthenticationError, match="key is missing or wrong"):
        client.with_options(api_key="other").messages.create(model=MODEL, max_tokens=5, messages=ASK)
