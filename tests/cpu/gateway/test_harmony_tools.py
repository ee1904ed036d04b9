"""gpt-oss's calls: messages to functions, between messages of reasoning and of content."""

import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers.utils.chat_template_utils import render_jinja_template

from kvforge.gateway.answers.answer_reader import AnswerReader
from kvforge.gateway.languages.asked_forms import Calls, Thinking
from kvforge.gateway.languages.call_events import Event
from kvforge.gateway.languages.call_reader import with_token_marks
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.tool_formats import formats, recognised
from kvforge.gateway.parsed_request import ParsedRequest
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.tokenization.chat_template import ChatTemplate
from kvforge.tokenization.conversation import render_conversation
from tests.cpu.gateway.events import cut, put_together
from tests.cpu.gateway.guided_texts import walked
from tests.support.models.checkpoints import write_byte_tokenizer

FORMAT = formats()["harmony"]
ASSISTANT = "<|start|>assistant"
TEMPLATE = (
    "{% for m in messages %}{% if m.reasoning %}<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning }}"
    "<|end|>{% endif %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}<|start|>assistant"
    " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% endif %}"
    "{% endfor %}"
)
"""Calls as the model's own template writes them: one in a message, the recipient before the channel."""
TYPES: dict[str, dict[str, list[str]]] = {"f": {}, "get_weather": {}, "a.b-c": {}}
Found = tuple[str, str, list[tuple[str, str]]]


def reader(tokens: tuple[str, ...] = (), calls: bool = True, forced: bool = False) -> AnswerReader:
    thinking = Thinking("harmony", False, dict.fromkeys(tokens, 0))
    asked = Calls("harmony", TYPES, FORMAT.prefix if forced else "", forced, True, tokens)
    return AnswerReader(
        ParsedRequest(b"", (), 1, (), None, False, False, calls=asked if calls else None, thinking=thinking)
    )


def read(one: AnswerReader, pieces: list[str]) -> Found:
    """Reasoning, content and calls."""
    events: list[Event] = [event for piece in pieces for event in one.push(piece, False)] + one.push("", True)
    return put_together(events)


def any_text(rng: random.Random) -> str:
    parts = ["a", "é", "😀", "\n", '"', "{", "}", "\\", "<|", "|>", "to=functions.f", "<|mess", "analysis"]
    return "".join(rng.choices(parts, k=rng.randrange(1, 9)))


@pytest.mark.parametrize("part", range(5))
def test_what_a_template_writes_is_read_and_written_again(part: int) -> None:
    """50 random turns each, cut anywhere."""
    for seed in range(part * 50, part * 50 + 50):
        rng = random.Random(seed)
        thought = any_text(rng).strip() if rng.random() < 0.6 else ""
        arguments = {any_text(rng): rng.choice([any_text(rng), 5, [any_text(rng)], {"a": None}]) for _ in range(2)}
        name = rng.choice(list(TYPES))
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
        message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": thought, "tool_calls": [call]}
        ((text,), _) = render_jinja_template([[message]], chat_template=TEMPLATE)
        answer = text.removeprefix(ASSISTANT)
        for tokens in ((), FORMAT.markers):
            marked = with_token_marks(answer, tokens)
            found = read(reader(tokens), [marked])
            assert found[:2] == (thought, "") and [(n, json.loads(a)) for n, a in found[2]] == [(name, arguments)], text
            for pieces in (list(marked), *(cut(rng, marked) for _ in range(4))):
                assert read(reader(tokens), pieces) == found, text
        call["function"] = {"name": name, "arguments": found[2][0][1]}
        assert render_conversation(ChatTemplate(TEMPLATE), [message], None, None, False) == text


CALL = '<|message|>{"a": 1}<|call|>'
AFTER_THOUGHT = f"<|channel|>analysis<|message|>so<|end|>{ASSISTANT}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"<|channel|>commentary to=functions.f <|constrain|>json{CALL}", ("", "", [("f", '{"a": 1}')])),
        (f"<|channel|>commentary to=functions.f<|constrain|>json{CALL}", ("", "", [("f", '{"a": 1}')])),
        (f"<|channel|>commentary to=functions.f{CALL}", ("", "", [("f", '{"a": 1}')])),
        (f" to=functions.f<|channel|>commentary json{CALL}", ("", "", [("f", '{"a": 1}')])),
        (f"{AFTER_THOUGHT} to=functions.f<|channel|>analysis json{CALL}", ("so", "", [("f", '{"a": 1}')])),
        (f"{AFTER_THOUGHT}<|channel|>commentary<|message|>I look.<|end|>{ASSISTANT}<|channel|>commentary to=functions.f"
         f"{CALL}", ("so", "I look.", [("f", '{"a": 1}')])),
        ("<|channel|>commentary to=functions.f<|message|>{\"a\"", ("", "", [("f", '{"a"')])),
        ("<|channel|>commentary to=functions.f", ("", "", [])),
        ("<|channel|>final<|message|>to=functions.f", ("", "to=functions.f", [])),
        (" to=functional", ("", " to=functional", [])),
        (" to", ("", " to", [])),
    ],
)  # fmt: skip
def test_calls_as_the_model_also_writes_them(text: str, found: Found) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert read(reader(), pieces) == found


def test_what_no_function_is_asked_is_content() -> None:
    """A function that is not one of the tools, and any where no calls are read."""
    text = f"{AFTER_THOUGHT}<|channel|>commentary to=functions.zzz{CALL}"
    for pieces in ([text], list(text)):
        assert read(reader(calls=False), pieces) == ("so", '{"a": 1}', [])
        thought, content, calls = read(reader(), pieces)
        assert thought == "so" and "zzz" in content and '{"a": 1}' in content and not calls


PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "additionalProperties": False}
FUNCTIONS = (Function("f", PERSON), Function("get_weather", {"type": "object", "additionalProperties": False}))


def test_guides(tmp_path: Any) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer is not None
    tokenizer.backend.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in FORMAT.markers])

    def token_of(text: str) -> int | None:
        return tokenizer.backend.token_to_id(text)

    def matches(guide: Any, text: str) -> bool:
        return walked(tokenizer, guide, text, frozenset(FORMAT.markers)) == (True, True)

    assert FORMAT.writes_reasoning
    free, forced = (make(FUNCTIONS, True, token_of) for make in (FORMAT.free, FORMAT.forced))
    assert (
        matches(free, "") and matches(free, "hello") and matches(free, f"{AFTER_THOUGHT}<|channel|>final<|message|>Hi")
    )
    by_constraint = "<|channel|>commentary to=functions.f <|constrain|>json"
    heads = (" to=functions.f<|channel|>commentary json", by_constraint, "<|channel|>commentary to=functions.f")
    for arguments, is_good in (('{"age": 5}', True), ('{"age": "x"}', False), ('{"more": 5}', False)):
        for head in heads:
            assert matches(free, f"{AFTER_THOUGHT}{head}<|message|>{arguments}") == is_good, head
            assert matches(free, f"{head}<|message|>{arguments}") == is_good, head
        rest = f"f <|constrain|>json<|message|>{arguments}"
        assert matches(forced, rest) == is_good
        answer = with_token_marks(rest, FORMAT.markers)
        assert read(reader(FORMAT.markers, forced=True), list(answer)) == ("", "", [("f", arguments)])
    assert not matches(free, "<|channel|>commentary to=functions.zzz<|message|>{}")
    assert not matches(forced, "zzz<|message|>{}") and not matches(forced, "hello")


def test_the_language_is_found_by_its_template() -> None:
    found = recognised(TEMPLATE)
    assert found is not None and found.name == "harmony"
