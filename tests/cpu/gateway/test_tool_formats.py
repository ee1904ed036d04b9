"""Calls in every written format, read however the text is cut: the same as from the whole text by plain means."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from kvforge.gateway.languages.call_events import Event, Text
from kvforge.gateway.languages.call_object import CallObject
from kvforge.gateway.languages.call_reader import CallReader
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.marked_text import TOKEN, MarkedText
from kvforge.gateway.languages.object_format import ObjectFormat
from kvforge.gateway.languages.schemas import moved
from kvforge.gateway.languages.tool_formats import formats, recognised
from kvforge.gateway.requests.functions import read_tools
from kvforge.runtime.requests.outputs import SequenceOutput
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.text.detokenizer import Detokenizer
from kvforge.runtime.text.stop import StopStrings
from kvforge.runtime.text.stream import TextStream
from kvforge.runtime.text.tokenizer import Tokenizer
from tests.cpu.gateway.events import put_together
from tests.cpu.gateway.guided_texts import walked
from tests.support.models.checkpoints import write_byte_tokenizer

OBJECTS = {name: form for name, form in formats().items() if isinstance(form, ObjectFormat)}
"""Those that write JSON objects; the others are in test_tool_languages.py."""
NAMES = ("f", "get_weather", "a.b-c")
Calls = list[tuple[str, str]]


def read(form: ObjectFormat, pieces: list[str], forced: bool = False, **how: Any) -> tuple[str, Calls]:
    """Content and calls."""
    notation, heads = how.get("notation", form.notation), how.get("heads")
    reader = CallReader(notation, lambda: CallObject(frozenset(NAMES), heads), forced)
    events: list[Event] = [event for piece in pieces for event in reader.push(piece)] + reader.end()
    reasoning, content, calls = put_together(events)
    assert not reasoning
    return content, calls


def any_text(rng: random.Random) -> str:
    parts = [
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        "\n",
        "é",
        "😀",
        "</tool_call>",
        "<tool_call>",
        "[TOOL_CALLS]",
        ",",
        " ",
        "a",
        ":",
    ]
    return "".join(rng.choices(parts, k=rng.randrange(8)))


def any_value(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(7 if depth < 3 else 4)
    if kind == 4:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind > 4:
        return any_object(rng, depth + 1)
    return (any_text(rng), rng.uniform(-9, 9), rng.choice((True, False, None)), rng.randrange(10**6))[kind]


def any_object(rng: random.Random, depth: int = 0) -> dict:
    return {any_text(rng): any_value(rng, depth) for _ in range(rng.randrange(3))}


def written(form: ObjectFormat, calls: Calls, rng: random.Random) -> str:
    """An answer's text with these calls and nothing else."""
    notation = form.notation
    objects = [f'{{"name": "{name}", "{form.key}": {arguments}}}' for name, arguments in calls]
    if notation.opens:
        blank = rng.choice(["", " ", "\n"])
        return f"{notation.begins}{blank}[{f',{blank}'.join(objects)}{blank}]"
    if notation.is_object:
        return rng.choice(["", *notation.ignored]) + "\n".join(objects)
    return "\n".join(f"{notation.begins}\n{text}\n{notation.closes}" for text in objects)


@pytest.mark.parametrize("form", OBJECTS.values(), ids=list(OBJECTS))
@pytest.mark.parametrize("seed", range(40))
def test_random_calls_cut_anywhere(form: ObjectFormat, seed: int) -> None:
    rng = random.Random(seed)
    calls = [
        (rng.choice(NAMES), json.dumps(any_object(rng), ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1))))
        for _ in range(rng.randrange(1, 4))
    ]
    before = rng.choice(["", "so be it: <b> [x] {", "é\n\n"])
    text = before + written(form, calls, rng)
    expected = (before.rstrip(), calls)
    assert read(form, [text]) == expected
    assert read(form, list(text)) == expected
    for at in range(len(text)):
        assert read(form, [text[:at], text[at:]]) == expected
    pieces = []
    rest = text
    while rest:
        size = rng.randrange(1, 9)
        pieces.append(rest[:size])
        rest = rest[size:]
    assert read(form, pieces) == expected


NO_CALLS = [
    "", " ", "\n\n", "plain {text}", "<tool_call", "<tool_call>", "<tool_call>\n", "<tool_call>\n{", "<tool_call> x",
    '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>', '<tool_call>{"name": "f"}</tool_call> ',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>\n{"name": "f", "arguments": ',
    '{"name": ', '{"name": "f', '{"name": "unknown", "parameters": {}} and', '{"name": "f", "parameters": 5} ',
    "[TOOL_CALLS", "[TOOL_CALLS] ", "[TOOL_CALLS] [", '[TOOL_CALLS] [{"name": "zzz", "arguments": {}}]',
    "[TOOL_CALLS][]", '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>[{"a"}]', "<|python_tag",
    "[TOOL_CALLS]x", '{"name": "\\',
]  # fmt: skip


@pytest.mark.parametrize("form", OBJECTS.values(), ids=list(OBJECTS))
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_only_looked_like_a_call_is_content(form: ObjectFormat, text: str) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert read(form, pieces) == (text, [])


@pytest.mark.parametrize("form", OBJECTS.values(), ids=list(OBJECTS))
def test_calls_that_are_cut_off_keep_what_they_have(form: ObjectFormat) -> None:
    rng = random.Random(1)
    text = written(form, [("f", '{"a": [1, {"b": "}"}]}')], rng)
    start = text.index('": {') + 3
    for end in range(start + 1, len(text)):
        content, calls = read(form, list(text[:end]))
        assert content == "" and calls[0][0] == "f" and '{"a": [1, {"b": "}"}]}'.startswith(calls[0][1])
        assert calls[0][1] == text[start:end][: len('{"a": [1, {"b": "}"}]}')]


HERMES = OBJECTS["hermes"]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {}, "id": {"x": "}"}}</tool_call>!', "!", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>ok', "ok", [("f", "{}")]),
        ('a <tool_call>{"name": "f", "arguments": {}} b', "a b", [("f", "{}")]),
        ('<tool_call><tool_call>{"name": "\\u0066", "arguments": {}}', "<tool_call>", [("f", "{}")]),
        ("x <tool_call>{}</tool_call>", "x <tool_call>{}</tool_call>", []),
    ],
)  # fmt: skip
def test_calls_as_models_also_write_them(text: str, content: str, calls: Calls) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert read(HERMES, pieces) == (content, calls)


def test_a_long_name_is_held_for_a_bounded_time_only() -> None:
    reader = CallReader(HERMES.notation, lambda: CallObject(frozenset(NAMES)))
    text = "<tool_call>" + json.dumps({"name": "f" * 5000, "arguments": {"a": "x" * 20_000}})
    events = [event for char in text for event in reader.push(char)] + reader.end()
    assert "".join(event.text for event in events if isinstance(event, Text)) == text


# What the models' own templates say, in a few words of theirs.
TEMPLATES = {
    "hermes": [
        '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>',
        "<|start_of_role|>assistant<|end_of_role|><tool_call>\\n{arguments}\\n</tool_call>",
        "{% if xml_tools or python_tools or tools %}<tool_call>{arguments}</tool_call> <code></code>",
    ],
    "phi4_mini": ["{{ '<|tool|>' + tools + '<|/tool|>' }}", '<|tool|>{}<|/tool|><|tool_call|>{"name": <|/tool_call|>'],
    "granite": ["<|start_of_role|>system<|end_of_role|>respond only with <|tool_call|> followed by a JSON list"],
    "gemma3": ["put calls into ```tool_code blocks"],
    "llama3_json": ['<|start_header_id|>{"name": "\' + tool_call.name + \'", \' + \'"parameters": \''],
    "mistral": ['{{ "[TOOL_CALLS] [" }}{{ tool_call.function|tojson }}'],
    "qwen3_coder": ["<tool_call>\n<function=f><parameter=x> arguments"],
    "mistral_args": ["[TOOL_CALLS]f[ARGS]{}"],
    "glm45": ["<tool_call>f<arg_key>x</arg_key><arg_value> arguments"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁sep｜>```json"],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁sep｜>"],
    "pythonic": ["<|start_header_id|>[func_name1(params_name1=value)]"],
    None: ["{{ messages }}", "<tool_call>f<arg_key>x</arg_key> arguments", "<tool_call>f<tool_sep> arguments"],
}  # fmt: skip


def test_formats_are_recognised_by_the_template() -> None:
    for name, sources in TEMPLATES.items():
        for source in sources:
            found = recognised(source)
            assert (found and found.name) == name, source


def test_a_list_may_have_another_mark(tokenizer: Tokenizer) -> None:
    """Granite 3.1 writes it in letters."""
    form = OBJECTS["granite"]
    guide = form.free(FUNCTIONS, True, token_of(tokenizer))
    for mark in ("<|tool_call|>", "<tool_call>"):
        text = f'so {mark}[{{"name": "f", "arguments": {{"age": 5}}}}]'
        assert matches(tokenizer, guide, text) == (True, True)
        assert not all(matches(tokenizer, guide, text.replace("5", '"x"')))
        for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
            assert read(form, pieces) == ("so", [("f", '{"age": 5}')])


def test_ids_for_templates_of_mistral() -> None:
    short = formats()["mistral"].template_ids()
    assert short("abcDEF123", "f") == short("abcDEF123", None) == "abcDEF123"
    ids = {short(f"call_{index}", None) for index in range(100)}
    assert len(ids) == 100 and all(len(entry) == 9 and entry.isalnum() for entry in ids)


def test_ids_that_say_name_and_number() -> None:
    """They are numbered through a conversation, and results have those of their calls."""
    numbered = formats()["kimi_k2"].template_ids()
    assert [numbered("a", "f"), numbered("b", "g"), numbered("a", None)] == [
        f"functions.{x}" for x in ("f:0", "g:1", "f:0")
    ]
    assert [numbered("a", "g"), numbered("a", None), numbered("c", None)] == ["functions.g:2", "functions.g:2", "c"]
    assert formats()["kimi_k2"].template_ids()("a", "f") == "functions.f:0"


PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "home": {"$ref": "#/$defs/Place"}},
    "required": ["age"],
    "additionalProperties": False,
    "$defs": {"Place": {"enum": ["here", "there"]}},
}
FUNCTIONS = (Function("f", PERSON), Function("get_weather", {"type": "object", "additionalProperties": False}))
GOOD: Calls = [("f", '{"age": 5, "home": "here"}'), ("get_weather", "{}")]
BAD: Calls = [("f", '{"age": "x"}'), ("f", '{"home": "here"}'), ("f", '{"age": 5, "home": "x"}'), ("zzz", "{}")]


@pytest.fixture(scope="module", params=["text", "special", "added"])
def tokenizer(request, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With all markers as text, as special tokens, or as tokens that a decoder shows (Qwen's)."""
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path)
    found = Tokenizer.from_dir(path)
    assert found is not None
    if request.param != "text":
        marks = sorted({mark for form in formats().values() for mark in form.markers})
        special = request.param == "special"
        marks = [mark for mark in marks if special or mark.startswith("<")]
        found.backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return found


def token_of(tokenizer: Tokenizer):
    added = tokenizer.backend.get_added_tokens_decoder()
    return lambda text: found if (found := tokenizer.backend.token_to_id(text)) in added else None


def matches(tokenizer: Tokenizer, guide, text: str) -> tuple[bool, bool]:
    """Whether a guide lets a text be written, and whether it may end there."""
    added = tokenizer.backend.get_added_tokens_decoder().values()
    return walked(tokenizer, guide, text, frozenset(token.content for token in added if token.special))


@pytest.mark.parametrize(
    ("given", "is_open"),
    [
        ({}, False),
        ({"strict": True}, False),
        ({"strict": False}, False),
        ({"parameters": None}, False),
        ({"parameters": {}}, False),
        ({"parameters": {"type": "object", "properties": {}}}, False),
        ({"parameters": {"type": "object", "properties": {}, "required": [], "title": "Nothing"}}, False),
        ({"parameters": {"type": "object"}}, True),
        ({"parameters": {"type": "object", "properties": {}, "additionalProperties": True}}, True),
    ],
)
@pytest.mark.parametrize("form", OBJECTS.values(), ids=list(OBJECTS))
def test_a_function_without_parameters_takes_none(
    form: ObjectFormat, tokenizer: Tokenizer, given: dict, is_open: bool
) -> None:
    """In OpenAI's ways to describe one; `{"type": "object"}` is any object, as JSON Schema and MCP say."""
    tools = read_tools({"tools": [{"type": "function", "function": {"name": "f", **given}}]})
    assert tools is not None
    functions = [*tools.functions, Function("g", PERSON)]
    for arguments, is_allowed in (("{}", True), ('{"a": 1}', is_open)):
        text = spelled(form, [("f", arguments)])
        assert matches(tokenizer, form.free(functions, True, token_of(tokenizer)), text)[0] == is_allowed
        call = f'{{"name": "f", "{form.key}": {arguments}}}'
        call = f"[{call}]" if form.notation.opens else call
        assert matches(tokenizer, form.forced(functions, True, token_of(tokenizer)), call) == (is_allowed, is_allowed)


@pytest.mark.parametrize("form", OBJECTS.values(), ids=list(OBJECTS))
def test_guides_of_free_answers(form: ObjectFormat, tokenizer: Tokenizer) -> None:
    guide = form.free(FUNCTIONS, True, token_of(tokenizer))
    rng = random.Random(0)
    for text in ("", "hello {x} < [", "so:\n"):
        assert matches(tokenizer, guide, text) == (True, True)
        for call in GOOD:
            assert matches(tokenizer, guide, text + spelled(form, [call])) == (True, True), call
    for call in BAD[: 3 if form.notation.is_object else 4]:
        assert not all(matches(tokenizer, guide, spelled(form, [call]))), call
    if form.notation.begins == "<tool_call>":
        assert matches(tokenizer, guide, written(form, GOOD, rng)) == (True, True)


def spelled(form: ObjectFormat, calls: Calls) -> str:
    notation = form.notation
    objects = ", ".join(f'{{"name": "{name}", "{form.key}": {arguments}}}' for name, arguments in calls)
    if notation.is_object:
        return objects
    ends = form.gap * (not notation.opens) + notation.closes + form.ends
    return notation.begins + form.gap + notation.opens + objects + ends


@pytest.mark.parametrize("form", OBJECTS.values(), ids=list(OBJECTS))
def test_guides_of_forced_answers(form: ObjectFormat, tokenizer: Tokenizer) -> None:
    for parallel, functions in itertools.product((True, False), (FUNCTIONS, FUNCTIONS[:1])):
        guide = form.forced(functions, parallel, token_of(tokenizer))
        several = bool(form.notation.opens)
        for name, arguments in [*GOOD, *BAD]:
            text = f'{{"name": "{name}", "{form.key}": {arguments}}}'
            allowed = (name, arguments) in GOOD and name in [function.name for function in functions]
            assert all(matches(tokenizer, guide, f"[{text}]" if several else text)) == allowed
            if several and allowed:
                assert all(matches(tokenizer, guide, f"[{text}, {text}]")) == parallel
        assert not all(matches(tokenizer, guide, "hello")) and not all(matches(tokenizer, guide, ""))


def test_special_markers_are_seen_and_calls_read_at_token_boundaries(tokenizer: Tokenizer) -> None:
    params = SamplingParams()
    text = '  é<tool_call>\n{"name": "f", "arguments": {"a": "😀 <tool_call>"}}\n</tool_call>'.replace(
        " <tool_call>", ""
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    added = tokenizer.backend.get_added_tokens_decoder()
    marks = {
        index: token.content for index, token in added.items() if token.special and token.content in HERMES.markers
    }
    for size in (1, 2, 3, 7, len(ids)):
        stream = MarkedText(lambda: TextStream(tokenizer, params), marks)
        pieces = [
            stream.push(SequenceOutput("", 0, ids[at : at + size])) for at in range(0, len(ids), size)
        ] + [stream.push(SequenceOutput("", 0, [2], finished=True, finish_reason="stop"))]  # fmt: skip
        assert "".join(pieces) == text
        assert read(HERMES, pieces) == ("  é", [("f", '{"a": "😀"}')])


@pytest.mark.parametrize("seed", range(40))
def test_stop_strings_end_marked_text_where_they_end_a_clients(tmp_path: Path, seed: int) -> None:
    """Markers that are tokens and in the text all the same, as Qwen's; stop strings beside, in and over them."""
    rng = random.Random(seed)
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer is not None
    markers = ("<tool_call>", "</tool_call>")
    tokenizer.backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in markers])
    marks = {tokenizer.backend.token_to_id(mark): TOKEN + mark for mark in markers}
    num_stopped = 0
    for _ in range(40):
        text = "".join(rng.choice([*markers, "a", "é", "tool_", "call>", "\n", "😀"]) for _ in range(rng.randint(1, 9)))
        start = rng.randrange(len(text))
        stops = [text[start : start + rng.randint(1, 14)], "never"][: rng.randint(1, 2)]
        ids = tokenizer.encode(text, add_special_tokens=False)
        params = SamplingParams(stop=stops)
        detokenizer, strings, outputs = Detokenizer(tokenizer, []), StopStrings(params), []
        while ids:
            piece, ids = ids[: (size := rng.randint(1, 3))], ids[size:]
            output = SequenceOutput("", 0, [])
            for token in piece:
                output.new_token_ids.append(token)
                if (reason := strings.push(detokenizer.push(token), search=True)[1]) is not None:
                    output.finished, output.finish_reason, output.stop_reason, ids = True, "stop", reason, []
                    num_stopped += 1
                    break
            outputs.append(output)
        if not outputs[-1].finished:
            outputs.append(SequenceOutput("", 0, [], finished=True, finish_reason="length"))
        plain, marked = (
            TextStream(tokenizer, params),
            MarkedText(lambda params=params: TextStream(tokenizer, params), marks, frozenset(marks)),
        )
        wanted = found = ""
        for output in outputs:
            wanted += plain.push(output)
            found += marked.push(output).replace(TOKEN, "")
            assert len(found) <= len(wanted), (text, stops)
        assert found == wanted, (text, stops)
    assert num_stopped > 20


def test_heads_with_most_in_common() -> None:
    """However many names there are, text that begins like a head is content up to where it differs from all."""
    rng = random.Random(0)
    names = sorted({"".join(rng.choice("ab") for _ in range(rng.randint(1, 9))) for _ in range(60)})
    heads = {HERMES.head(name): name for name in names}
    for _ in range(400):
        name = "".join(rng.choice("abc") for _ in range(rng.randint(1, 10)))
        text = HERMES.head(name) + "{}}"
        reader = CallObject(frozenset(names), heads)
        events: list = []
        for letter in text:
            if not reader.ended:
                events += reader.push(letter)[0]
        if name in names:
            assert reader.text is None and events[0].name == name
        else:
            like = max(next(n for n in range(len(head), -1, -1) if text.startswith(head[:n])) for head in heads)
            assert reader.text == text[:like] and not events


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('so {"name": "f", "parameters": {"a": 1}}', "so", [("f", '{"a": 1}')]),
        ('{"name": "f","parameters": {"a": 5}}', None, []),
        ('{"name": "f", "arguments": {"zzz": 5}}', None, []),
        ('{"name": "f", "id": 1, "parameters": {}}', None, []),
        ('{"name": "fg"} {"name": "f", "parameters": {}}', '{"name": "fg"}', [("f", "{}")]),
        ('{"name": "f", "para', None, []),
    ],
)  # fmt: skip
def test_only_what_a_guide_knows_by_its_beginning_is_a_call(text: str, content: str | None, calls: Calls) -> None:
    form = OBJECTS["llama3_json"]
    heads = {form.head(name): name for name in NAMES}
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert read(form, pieces, heads=heads) == (text if content is None else content, calls)


def test_a_marker_that_is_a_token_cannot_be_spelt() -> None:
    notation = HERMES.notation.with_tokens(["<tool_call>", "</tool_call>"])
    spelt = '<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>'
    text = f'{spelt} {TOKEN}<tool_call>\n{{"name": "f", "arguments": {{}}}}\n{TOKEN}</tool_call> end{TOKEN}</tool_call>'
    for pieces in ([text], list(text)):
        assert read(HERMES, pieces, notation=notation) == (f"{spelt} end</tool_call>", [("f", "{}")])


def test_references() -> None:
    schema = {"$defs": {"A": {"items": {"$ref": "#/$defs/B"}}}, "properties": {"$ref": {"$ref": "#/$defs/A"}}}
    assert moved(schema, "#/x")["properties"] == {"$ref": {"$ref": "#/x/$defs/A"}}


CIRCLE = {"items": {"$ref": "#/$defs/a"}, "type": "array"}
INNER = {name: {"type": "string"} for name in "abcde"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$defs": {"a": CIRCLE}, "properties": {"x": {"$ref": "#/$defs/a"}}},
         '{"x": [[], [[]]]}', '{"x": [1]}'),
        ({"properties": {"a": {"type": "integer", "multipleOf": 5}}}, '{"a": 15}', '{"a": 14}'),
        ({"properties": {"bookingRef": {"type": "string"}}}, '{"bookingRef": "x"}', '{"bookingRef": 1}'),
        ({"properties": {"a\u0001": {"const": "\u0002"}}}, '{"a\\u0001": "\\u0002"}', '{"a\\u0001": "\\u0003"}'),
        ({"properties": {f"p{index}": {"type": "object", "properties": INNER} for index in range(100)}},
         '{"p99": {"e": "x"}}', '{"p99": {"e": 1}}'),
    ],
    ids=["circle", "multipleOf", "Ref in a name", "control characters", "many properties"],
)  # fmt: skip
@pytest.mark.parametrize("form", OBJECTS.values(), ids=list(OBJECTS))
def test_guides_of_free_answers_take_what_guides_of_forced_ones_do(
    form: ObjectFormat, tokenizer: Tokenizer, schema: dict, good: str, bad: str
) -> None:
    guide = form.free([Function("f", {"type": "object", **schema})], True, token_of(tokenizer))
    assert matches(tokenizer, guide, spelled(form, [("f", good)])) == (True, True)
    assert not matches(tokenizer, guide, spelled(form, [("f", bad)]))[0]
