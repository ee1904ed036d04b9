"""Reasoning in every written format, read however the text is cut: the same as from the whole text by plain means."""

import random
from collections.abc import Collection, Sequence

import pytest

from kvforge.gateway.answers.answer_reader import AnswerReader
from kvforge.gateway.answers.reasoning_tokens import reasoning_tokens
from kvforge.gateway.languages.asked_forms import Calls, Thinking
from kvforge.gateway.languages.call_events import Arguments, CallBegins, Reasoning, Text
from kvforge.gateway.languages.marked_text import TOKEN
from kvforge.gateway.languages.reasoning_format import plain
from kvforge.gateway.languages.reasoning_formats import reasoning_formats, recognised_reasoning
from kvforge.gateway.parsed_request import ParsedRequest

FORMATS = reasoning_formats()
PARTS = ["<think>", "</think>", "<|channel>", "<channel|>", "thought\n",
         "<thi", "</", "<", "\n", "\n\n", " ", "é", "😀", "a", "<tool_call>", "<|channel|>",
         "<|end|>", "analysis", "final"]  # fmt: skip


def read(name: str, pieces: Sequence[str], opened: bool = False, tokens: Collection[str] = ()) -> tuple[str, str]:
    """Reasoning and content."""
    reader = FORMATS[name].read(opened, tokens)
    said = ["", ""]
    for index, piece in enumerate(pieces):
        for event in reader.push(piece, index == len(pieces) - 1):
            said[not isinstance(event, Reasoning)] += event.text
    return said[0], plain(said[1])


def cuts(text: str, rng: random.Random) -> list[list[str]]:
    """A text whole, by letters, in two at any place, and in random pieces."""
    pieces, rest = [], text
    while rest:
        size = rng.randrange(1, 9)
        pieces.append(rest[:size])
        rest = rest[size:]
    return [[text], list(text), *([text[:at], text[at:]] for at in range(len(text))), [*pieces, ""]]


def any_text(rng: random.Random, without: Collection[str]) -> str:
    return "".join(rng.choices([part for part in PARTS if part not in without], k=rng.randrange(9)))


@pytest.mark.parametrize("name", ["think", "gemma4"])
@pytest.mark.parametrize("seed", range(200))
def test_thoughts_cut_anywhere(name: str, seed: int) -> None:
    rng = random.Random(seed)
    begins, ends = FORMATS[name].around or (FORMATS[name].begins, FORMATS[name].ends)
    thought = any_text(rng, {ends, "</"}).strip("\n")
    content = any_text(rng, ()).lstrip("\n")
    opened = rng.random() < 0.5
    before = "" if opened else rng.choice(["", "\n", " "]) + begins
    text = (
        f"{before}{rng.choice(['', chr(10)])}{thought}{rng.choice(['', chr(10)])}{ends}{rng.choice(['', chr(10) * 2])}"
    )
    for pieces in cuts(text + content, rng):
        assert read(name, pieces, opened) == (thought, content)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("hello", False, "", "hello"),
        ("", False, "", ""),
        ("\n\n", False, "", "\n\n"),
        ("<thin", False, "", "<thin"),
        (" a <think>b</think>c", False, "", " a <think>b</think>c"),
        ("<think>a", False, "a", ""),
        ("<think>a</thin", False, "a</thin", ""),
        ("a\n", True, "a\n", ""),
        ("a\n\n\n", True, "a\n\n\n", ""),
        ("a\n\n<", True, "a\n\n<", ""),
        ("\n\na\n\n\nb\n\n</think>\n\nc", True, "a\n\n\nb", "c"),
        ("\n\n\n</think>a", True, "", "a"),
        ("\n \n<think>a", False, "a", ""),
        ("\n \n<thin", False, "", "\n \n<thin"),
        ("</think>a", True, "", "a"),
        ("</think>a", False, "", "</think>a"),
        ("<think>a</think>b</think><think>c", False, "a", "b</think><think>c"),
        ("<think>\n\n</think>\n\nHi", False, "", "Hi"),
    ],
)
def test_what_is_no_thought_is_content(text: str, opened: bool, reasoning: str, content: str) -> None:
    for pieces in cuts(text, random.Random(0)):
        assert read("think", pieces, opened) == (reasoning, content), pieces


def test_marks_that_are_tokens_are_not_written_by_letters() -> None:
    tokens = ("<think>", "</think>")
    text = f"{TOKEN}<think>see </think> {TOKEN}<tool_call> there{TOKEN}</think>ok <think> {TOKEN}</think>"
    for pieces in cuts(text, random.Random(0)):
        assert read("think", pieces, tokens=tokens) == ("see </think> <tool_call> there", "ok <think> </think>")


@pytest.mark.parametrize("thought", ["", f"{TOKEN}<think>\nso{TOKEN}</think>\n\n"])
def test_calls_whose_marks_are_tokens_follow_it(thought: str) -> None:
    """As Qwen 3 writes them; letters that say the same are content."""
    calls = Calls("hermes", {"f": {}}, "", forced=False, parallel=True, tokens=("<tool_call>", "</tool_call>"))
    thinking = Thinking("think", False, {"<think>": 1, "</think>": 2})
    asked = ParsedRequest(b"", (b"",), 1, (), None, True, False, calls=calls, thinking=thinking)
    call = f'{TOKEN}<tool_call>\n{{"name": "f", "arguments": {{}}}}\n{TOKEN}</tool_call>'
    text = f"{thought}a <tool_call> b{TOKEN}</think>\n{call}"
    for pieces in cuts(text, random.Random(0)):
        reader = AnswerReader(asked)
        events = [event for at, piece in enumerate(pieces) for event in reader.push(piece, at == len(pieces) - 1)]
        said = {kind: "".join(event.text for event in events if isinstance(event, kind)) for kind in (Reasoning, Text)}
        assert said == {Reasoning: "so" if thought else "", Text: "a <tool_call> b</think>"}
        assert [event.name for event in events if isinstance(event, CallBegins)] == ["f"]
        assert "".join(event.text for event in events if isinstance(event, Arguments)) == "{}"


def message(channel: str | None, text: str, end: str = "<|end|>") -> str:
    head = "" if channel is None else f"<|channel|>{channel}"
    return f"{head}<|message|>{text}{end}"


@pytest.mark.parametrize("seed", range(200))
def test_channels_cut_anywhere(seed: int) -> None:
    rng = random.Random(seed)
    tokens = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>") if seed % 2 else ()
    kinds = {"analysis": 0, "final": 1, "commentary": 1, "commentary <|constrain|>json": 1, None: 1}
    said: list[list[str]] = [[], []]
    text = ""
    for index in range(rng.randrange(1, 5)):
        channel = rng.choice(list(kinds))
        body = any_text(rng, ("<|channel|>", "<|end|>") if not tokens else ())
        if body:
            said[kinds[channel]].append(body)
        text += ("<|start|>assistant" if index else "") + message(channel, body)
    if tokens:
        for marker in tokens:  # what the bodies have is letters
            text = text.replace(marker, TOKEN + marker)
        said = [[body.replace(TOKEN, "") for body in bodies] for bodies in said]
        if any(marker in body for bodies in said for body in bodies for marker in tokens):
            return
    expected = ("\n".join(said[0]), "\n".join(said[1]))
    for pieces in cuts(text, rng):
        assert read("harmony", pieces, tokens=tokens) == expected


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("hello", "", "hello"),
        ("<|chan", "", "<|chan"),
        (message("analysis", "a", ""), "a", ""),
        (message("analysis", "a") + "<|start|>assistant" + message("final", "b", ""), "a", "b"),
        ("<|channel|>analysis", "", ""),
        (message("analysis", "a") + "lost" + message("final", "b", "<|return|>"), "a", "b"),
    ],
)
def test_channels_as_models_also_write_them(text: str, reasoning: str, content: str) -> None:
    for pieces in cuts(text, random.Random(0)):
        assert read("harmony", pieces) == (reasoning, content)


# What the models' own templates say, in a few words of theirs.
TEMPLATES = {
    "think": ["{%- set content = content.split('</think>')[-1].lstrip('\\n') %}", "<think>\\n\\n</think>\\n\\n"],
    "gemma4": ["{{ '<|channel>thought\\n' + m.reasoning + '\\n<channel|>' }} <|think|>"],
    "harmony": ['{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}'],
    None: ["{{ messages }}", "<think>", "<think></think><response></response>"],
}  # fmt: skip


def test_formats_are_recognised_by_the_template() -> None:
    for name, sources in TEMPLATES.items():
        for source in sources:
            found = recognised_reasoning(source)
            assert (found and found.name) == name, source


@pytest.mark.parametrize(
    ("opened", "tokens", "count"),
    [
        (True, [5, 6, 9, 7, 7], 3),
        (True, [5, 6], 2),
        (False, [8, 5, 9, 7], 3),
        (False, [3, 8, 5, 9, 7], 3),
        (False, [3, 3, 8, 5, 9, 7], 3),
        (False, [5, 8, 5, 9], 0),
        (False, [9, 8, 5, 9], 0),
        (False, [5, 5, 5], 0),
        (False, [8, 8, 9, 9], 3),
    ],
)
def test_reasoning_tokens_are_counted(opened: bool, tokens: list[int], count: int) -> None:
    """White space is 3; behind other tokens what looks like reasoning is content."""
    for size in range(1, len(tokens) + 1):
        counter = reasoning_tokens(Thinking("think", opened, {"<think>": 8, "</think>": 9}), (3).__eq__)
        assert counter is not None
        parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        assert sum(counter.count(0, part) for part in parts) == count
        assert counter.count(1, [8, 9]) == 2


def test_reasoning_tokens_are_not_guessed() -> None:
    assert reasoning_tokens(None, (3).__eq__) is None
    assert reasoning_tokens(Thinking("think", True, {}), (3).__eq__) is None
    assert reasoning_tokens(Thinking("harmony", False, {"<|end|>": 3}), (3).__eq__) is None
