"""Calls written by a template, read however the text is cut, written again as before; and those that are no JSON
objects in every other respect, which test_tool_formats.py has for objects."""

import copy
import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
from tokenizers import AddedToken

from kvforge.gateway.answers.answer_reader import AnswerReader
from kvforge.gateway.languages.asked_forms import Calls
from kvforge.gateway.languages.call_events import Event
from kvforge.gateway.languages.call_reader import with_token_marks
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.grammar_format import GrammarFormat
from kvforge.gateway.languages.marked_text import TOKEN
from kvforge.gateway.languages.tagged_format import TaggedFormat
from kvforge.gateway.languages.tool_formats import formats, recognised
from kvforge.gateway.parsed_request import ParsedRequest
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.tokenization.chat_template import ChatTemplate
from kvforge.tokenization.conversation import render_conversation
from tests.cpu.gateway.events import cut, put_together
from tests.cpu.gateway.guided_texts import walked
from tests.cpu.gateway.language_templates import TEMPLATES, Written, by_transformers
from tests.support.models.checkpoints import write_byte_tokenizer

FORMATS = {name: form for name, form in formats().items() if name != "harmony"}
"""But for the one that is read with the reasoning, in test_harmony_tools.py."""
LANGUAGES = {name: form for name, form in FORMATS.items() if isinstance(form, GrammarFormat)}
PLAIN_NAMES = ("gemma4",)
"""Languages that write names of members without quotation marks, also inside of arguments."""
TYPES = {
    "f": {"city": ["string"], "note": ["string"], "days": ["number"], "where": ["array"], "opts": ["object"],
          "wind": ["number"], "size": ["null", "number"]},
    "get_weather": {},
    "a.b-c": {"x": ["string"]},
}  # fmt: skip
"""Of the arguments of each function."""

every_language = pytest.mark.parametrize("name", FORMATS)
written_otherwise = pytest.mark.parametrize("name", LANGUAGES)
"""Than as JSON objects."""


def reader_of(name: str, tokens: tuple[str, ...] = (), forced: bool = False, parallel: bool = True) -> AnswerReader:
    calls = Calls(name, TYPES, FORMATS[name].prefix if forced else "", forced, parallel, tokens)
    return AnswerReader(ParsedRequest(b"", (), 1, (), None, False, False, calls=calls))


def read(reader: AnswerReader, pieces: list[str], said: Iterable[Event] = ()) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, those that were said before among them."""
    events: list[Event] = [event for piece in pieces for event in reader.push(piece, False)] + reader.push("", True)
    reasoning, content, calls = put_together([*said, *events])
    assert not reasoning
    return content, calls


def any_text(rng: random.Random, parts: list[str]) -> str:
    return "".join(rng.choices(["a", "é", "😀", "\n", " ", '"', "'", "\\", "{", "}", "[", "]", ",", ")", *parts],
                               k=rng.randrange(9)))  # fmt: skip


def any_json(rng: random.Random, parts: list[str], depth: int = 2) -> Any:
    kind = rng.randrange(5 if depth else 3)
    if kind == 3:
        return [any_json(rng, parts, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 4:
        return {any_text(rng, parts): any_json(rng, parts, depth - 1) for _ in range(rng.randrange(3))}
    return (any_text(rng, parts), rng.randrange(-99, 99), rng.uniform(-9, 9))[kind]


def any_calls(rng: random.Random, parts: list[str], any_names: bool = True) -> Written:
    """Of the types that TYPES says; names inside them are any texts, or plain ones."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict) and not any_names:
            return {f"k{index}": plain(inner) for index, inner in enumerate(value.values())}
        return list(map(plain, value)) if isinstance(value, list) else value

    make = {
        "city": lambda: any_text(rng, parts), "note": lambda: any_text(rng, parts), "x": lambda: any_text(rng, parts),
        "days": lambda: rng.randrange(99), "wind": lambda: rng.uniform(-9, 9), "size": lambda: rng.randrange(9),
        "where": lambda: [any_json(rng, parts) for _ in range(rng.randrange(3))],
        "opts": lambda: {any_text(rng, parts): any_json(rng, parts) for _ in range(rng.randrange(3))},
    }  # fmt: skip
    names = [rng.choice(list(TYPES)) for _ in range(rng.randrange(1, 4))]
    return [(name, {key: plain(make[key]()) for key in TYPES[name] if rng.random() < 0.6}) for name in names]


@every_language
def test_a_language_is_found_by_its_template(name: str) -> None:
    found = recognised(TEMPLATES[name])
    assert found is not None and found.name == name


@every_language
@pytest.mark.parametrize("part", range(5))
def test_what_a_template_writes_is_read_and_written_again(name: str, part: int) -> None:
    """50 random conversations, cut anywhere, with what is a mark in text and in tokens."""
    form, template = FORMATS[name], ChatTemplate(TEMPLATES[name])
    ends = {mark for mark in ("</parameter>", "</arg_value>") if isinstance(form, TaggedFormat)}
    parts = [mark[:-1] for mark in form.markers] + ["<tool", "[TOOL", "```", "</", "[f(", "f(a=1)"]
    for seed in range(part * 50, part * 50 + 50):
        rng = random.Random(seed)
        calls = any_calls(rng, parts, name not in PLAIN_NAMES)
        content = rng.choice(["", "so:", "é\n\nx"])
        text = by_transformers(name, content, calls)
        assert not any(text.count(end) > text.count("<" + end[2:5]) for end in ends)
        for tokens in ((), form.markers):
            marked = with_token_marks(text, tokens)
            found, read_calls = read(reader_of(name, tokens), [marked])
            assert found == content.rstrip(), text
            assert [(n, json.loads(a)) for n, a in read_calls] == calls, text
            assert read(reader_of(name, tokens), list(marked)) == (found, read_calls)
            for _ in range(4):
                assert read(reader_of(name, tokens), cut(rng, marked)) == (found, read_calls)
        again = [
            {"id": "123456789", "type": "function", "function": {"name": n, "arguments": a}} for n, a in read_calls
        ]
        conversation = [{"role": "assistant", "content": content, "tool_calls": again}]
        ids = form.template_ids()
        assert render_conversation(template, conversation, None, None, False, False, ids) == text


@every_language
def test_half_of_what_a_template_writes_loses_nothing(name: str) -> None:
    """Every beginning of an answer: content as it is, or the beginning of the calls."""
    rng = random.Random(1)
    for _ in range(20):
        calls = any_calls(rng, ["<tool"], name not in PLAIN_NAMES)
        text = by_transformers(name, "so: ", calls)
        _, whole = read(reader_of(name), [text])
        by_letter, said = reader_of(name), list[Event]()
        for end in range(len(text)):
            content, found = read(copy.deepcopy(by_letter), [], said)
            assert (content, found) == read(reader_of(name), [text[:end]])
            said += by_letter.push(text[end], False)
            if found:  # and perhaps the beginning of the next one's mark
                assert content[:3] == "so:" and text[:end].endswith(content[3:]), (text, end)
            else:
                assert stripped(name, content) == stripped(name, text[:end]), (text, end)
            assert [n for n, _ in found] == [n for n, _ in whole][: len(found)]
            for (_, arguments), (_, all_of_them) in zip(found[:-1], whole, strict=False):
                assert arguments == all_of_them


HOSTILE = [
    "", " ", "\n\n", "plain {text} [x]", "<tool_call", "<tool_call>", "<tool_call>\n", "<tool_call>\n<function=",
    "<tool_call>\n<function=zzz>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>zzz\n</tool_call>",
    "<tool_call>f", "<tool_call>f\nx", "[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]5",
    "[TOOL_CALLS]zzz[ARGS]{}", "[TOOL_CALLS]f{}", "[", "[f", "[f(", "[f(5)]", "[f(a", "[g(a=1)]", "[1, 2, f(a=1)]",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>zzz\n```json\n{}\n```",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>5", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n[]",
    "<minimax:tool_call", '<invoke name="', '<invoke name="f', '<invoke name="f">\n<par',
    '<invoke name="zzz">\n</invoke>',
    "<|tool_call_begin|>", "<|tool_call_begin|>functions.f:", "<|tool_call_begin|>functions.zzz:0",
    "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[]",
    "<|tool_call>", "<|tool_call>call:", "<|tool_call>call:f", "<|tool_call>call:zzz{}<tool_call|>", "<|tool_call>f{}",
    "<|tool_call>call:f[1]", "```tool_code", "```\nf()\n```",
    "```tool_code\nf", "```tool_code\nprint(f())\n```", "```tool_code\nzzz(a=1)\n```",
    "<tool_call>\n<function=f>\nhello", "[TOOL_CALLS]" + "f" * 300, "<tool_call>" + "f" * 300,
]  # fmt: skip


@written_otherwise
@pytest.mark.parametrize("text", HOSTILE)
def test_what_only_looked_like_a_call_is_content(name: str, text: str) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert read(reader_of(name), pieces) == (text, [])


@written_otherwise
def test_any_text_is_read_alike_however_it_is_cut(name: str) -> None:
    """Of marks and pieces of them in any order; what is no call is content, letter by letter."""
    form = LANGUAGES[name]
    for seed in range(300):
        rng = random.Random(seed)
        example = by_transformers(name, "", any_calls(rng, list(form.marks)))
        parts = [*form.marks, *cut(rng, example)[:6], example[: rng.randrange(len(example))], "f", "x", "\n", "{}", "]"]
        text = "".join(rng.choices(parts, k=rng.randrange(1, 9)))
        found = read(reader_of(name), [text])
        assert read(reader_of(name), list(text)) == found, text
        assert read(reader_of(name), cut(rng, text)) == found, text
        if not found[1]:
            assert found[0].replace(" ", "").replace("\n", "") == stripped(name, text), text


def stripped(name: str, text: str) -> str:
    """A text without what may stand around calls and says nothing."""
    for mark in FORMATS[name].notation.ignored:
        text = text.replace(mark, "")
    return text.replace(" ", "").replace("\n", "")


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=days>\nTrue\n</parameter>\n"
         "<parameter=opts>\n{'a': None}\n</parameter>\n</function>\n</tool_call>",
         [("f", '{"days": true, "opts": {"a": null}}')]),
        ("qwen3_coder", "<tool_call><function=f><parameter=city>Zürich</parameter></function></tool_call>",
         [("f", '{"city": "Zürich"}')]),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=new>\n5\n</parameter>\n<parameter=t>\nab c\n"
         "</parameter>\n</function>\n</tool_call>", [("get_weather", '{"new": 5, "t": "ab c"}')]),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=city>\n12\n</parameter>\n</tool_call>",
         [("f", '{"city": "12"}')]),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="city"> a b </parameter>'
         '<parameter name="days">3</parameter></invoke><invoke name="get_weather"></invoke></minimax:tool_call>',
         [("f", '{"city": " a b ", "days": 3}'), ("get_weather", "{}")]),
        ("kimi_k2", "<|tool_calls_section_begin|> <|tool_call_begin|>functions.f:12<|tool_call_argument_begin|> {}"
         "<|tool_call_end|>\n<|tool_call_begin|>functions.a.b-c<|tool_call_argument_begin|>{}<|tool_call_end|>"
         "<|tool_calls_section_end|>", [("f", "{}"), ("a.b-c", "{}")]),
        ("glm45", "<tool_call>get_weather</tool_call>", [("get_weather", "{}")]),
        ("glm45", "<tool_call>f<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>", [("f", '{"days": 3}')]),
        ("mistral_args", '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"days": 3}', [("f", '{"days": 3}')]),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
         "```json\n{\n  \"days\": 3\n}\n```\n<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [("f", '{\n  "days": 3\n}')]),
        ("pythonic", "<|python_start|>[f(city='Zürich, \\'CH\\'', days=3), get_weather()]<|python_end|>",
         [("f", '{"city": "Zürich, \'CH\'", "days": 3}'), ("get_weather", "{}")]),
        ("gemma3", "```tool_code\nf(city='Zürich', days=3)\n```\n```tool_code\nget_weather()```",
         [("f", '{"city": "Zürich", "days": 3}'), ("get_weather", "{}")]),
        ("gemma4", '<|tool_call>call:f{ city: <|"|>Zürich, {"CH"}<|"|> , days:3,\n where:[ 1 , <|"|>a<|"|> ,{b:none}]}'
         '<tool_call|>', [("f", '{"city": "Zürich, {\\"CH\\"}", "days": 3, "where": [1, "a", {"b": "none"}]}')]),
        ("gemma4", '<|tool_call>call:f{city:12,opts:{<|"|>a<|"|>:None,b:Yes we can},size:null}<tool_call|>'
         "<|tool_call>call:get_weather{}<tool_call|>",
         [("f", '{"city": "12", "opts": {"a": null, "b": "Yes we can"}, "size": null}'), ("get_weather", "{}")]),
        ("pythonic", "[f(opts={'a': [True, None]}, city=San Francisco)]",
         [("f", '{"opts": {"a": [true, null]}, "city": "San Francisco"}')]),
    ],
)  # fmt: skip
def test_calls_as_models_also_write_them(name: str, text: str, calls: list) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert read(reader_of(name), pieces) == ("", calls)


@pytest.mark.parametrize("name", sorted(name for name, form in LANGUAGES.items() if form.notation.begins in form.marks))
def test_marks_that_are_tokens_cannot_be_spelt(name: str) -> None:
    """But for Python's notation, whose marks are text."""
    form = LANGUAGES[name]
    text = by_transformers(name, "", [("f", {"city": "x"})])
    assert read(reader_of(name, form.marks), [text]) == (text, [])
    for mark in form.marks:
        calls = [("f", {"city": f"a{mark}b", "days": 3})]
        inner = by_transformers(name, "", calls)
        marked = with_token_marks(inner, form.marks).replace("a" + TOKEN + mark, "a" + mark)
        found = read(reader_of(name, form.marks), list(marked))
        assert [(n, json.loads(a)) for n, a in found[1]] == calls and found[0] == "", inner


PERSON = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0},
        "home": {"$ref": "#/$defs/Place"},
        "name": {"type": "string"},
    },
    "required": ["age"],
    "additionalProperties": False,
    "$defs": {"Place": {"enum": ["here", "there"]}},
}
FUNCTIONS = (Function("f", PERSON), Function("get_weather", {"type": "object", "additionalProperties": False}),
             Function("a.b-c", {"type": "object"}))  # fmt: skip
GOOD: Written = [
    ("f", {"age": 5}), ("f", {"age": 5, "home": "here"}), ("f", {"age": 5, "home": "there", "name": "a\"<é\n"}),
    ("get_weather", {}), ("a.b-c", {}), ("a.b-c", {"anything": "x"}),
]  # fmt: skip
BAD: Written = [
    ("f", {"age": -5}), ("f", {"home": "here"}), ("f", {"age": 5, "home": "x"}), ("f", {"age": 5, "more": "x"}),
    ("get_weather", {"a": "x"}), ("zzz", {}),
]  # fmt: skip


@pytest.fixture(scope="module", params=["text", "special"])
def tokenizer(request, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With all marks as text, or as special tokens."""
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path)
    found = Tokenizer.from_dir(path)
    assert found is not None
    if request.param == "special":
        marks = sorted({mark for form in LANGUAGES.values() for mark in form.marks})
        found.backend.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return found


def matches(tokenizer: Tokenizer, guide: Any, text: str) -> bool:
    """Whether a guide lets a text be written, and end there."""
    added = frozenset(token.content for token in tokenizer.backend.get_added_tokens_decoder().values())
    return walked(tokenizer, guide, text, added) == (True, True)


@written_otherwise
def test_guides(name: str, tokenizer: Tokenizer) -> None:
    form = LANGUAGES[name]

    def token_of(text: str) -> int | None:
        added = tokenizer.backend.get_added_tokens_decoder()
        return found if (found := tokenizer.backend.token_to_id(text)) in added else None

    free = form.free(FUNCTIONS, True, token_of)
    assert all(matches(tokenizer, free, text) for text in ("", "hello {x} < [", "so:\n"))
    for calls in [*([call] for call in GOOD), GOOD[:3]]:
        text = by_transformers(name, "", calls)
        assert matches(tokenizer, free, "so: " + text), text
        for parallel in (True, False):
            forced = form.forced(FUNCTIONS, parallel, token_of)
            assert matches(tokenizer, forced, text.removeprefix(form.prefix)) == (parallel or len(calls) == 1), text
    forced = form.forced(FUNCTIONS, True, token_of)
    assert not matches(tokenizer, forced, "hello") and not matches(tokenizer, forced, "")
    for call in BAD:
        text = by_transformers(name, "", [call])
        assert not matches(tokenizer, forced, text.removeprefix(form.prefix)), text
        assert name == "pythonic" or not matches(tokenizer, free, text), text
    one = form.free(FUNCTIONS, False, token_of)
    assert matches(tokenizer, one, by_transformers(name, "", GOOD[:1]))
    if form.wraps[1] or token_of(form.notation.begins) is not None:  # else the text behind a call may look like one
        assert not matches(tokenizer, one, by_transformers(name, "", GOOD[:2]))


@written_otherwise
def test_forced_answers_are_read_from_the_prefix_on(name: str) -> None:
    form = LANGUAGES[name]
    for calls in ([GOOD[1]], GOOD[:2]):
        text = by_transformers(name, "", calls)
        assert text.startswith(form.prefix)
        rest = with_token_marks(text.removeprefix(form.prefix), form.marks)
        found = read(reader_of(name, form.marks, forced=True), list(rest))
        assert [(n, json.loads(a)) for n, a in found[1]] == calls and found[0] == ""
        assert len(read(reader_of(name, form.marks, forced=True, parallel=False), list(rest))[1]) == 1


def test_what_guides_of_tags_do_not_keep_is_said() -> None:
    form = LANGUAGES["glm45"]
    text = {"type": "string", "maxLength": 5, "pattern": "^a"}
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    number = {"type": "number", "minimum": 5}
    properties = {"a": text, "b": optional, "c": number, "d": {"enum": ["x", "y"]}, "e<": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["a"]}
    assert not form.unguided(Function("f", schema))
    odd = [{"type": "string", "pattern": "^a|b$"}, {"type": "string", "pattern": "(^a)"}, {"type": ["string", "null"],
           "maxLength": 5}, {"type": "string", "minLength": 5000}, {"type": "string", "format": "email"}]  # fmt: skip
    for part, keyword in zip(odd, ["pattern", "pattern", "maxLength", "minLength", "format"], strict=True):
        assert set(form.unguided(Function("f", {"type": "object", "properties": {"a": part}}))) == {keyword}
    assert set(form.unguided(Function("f", {**schema, "required": ["e<"], "minProperties": 1}))) == {
        "required", "minProperties"
    }  # fmt: skip
    assert not form.unguided(Function("f", {"type": "object", "properties": {"b": optional, "c": number}}))
    assert not LANGUAGES["mistral_args"].unguided(Function("f", schema))


DEEP = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/Tree"},
        "Kind": {"enum": ["a", 1, None, [True, {"x": "y"}]]},
        "rows": {"type": "array", "items": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "string"}]}},
        "map": {"type": "object", "properties": {"n": {"type": "boolean"}}, "additionalProperties": {"type": "number"}},
        "free": {},
        "code": {"type": ["string", "null"], "pattern": "^[A-Z<]+$", "maxLength": 3},
    },
    "required": ["Kind"],
    "additionalProperties": False,
    "$defs": {
        "Tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}, "additionalProperties": False}
    },
}


@pytest.mark.parametrize(
    ("arguments", "is_good"),
    [
        ({"Kind": "a"}, True),
        ({"Kind": 1, "tree": {"left": {"left": {}}}}, True),
        ({"Kind": None, "rows": [1, "x<", 9], "free": {"a": [1.5, {"b": "c"}]}}, True),
        ({"Kind": [True, {"x": "y"}], "map": {"n": True, "other": 5}}, True),
        ({"Kind": 1, "free": "text"}, True),
        ({"Kind": 1, "code": "AB<"}, True),
        ({"Kind": 1, "code": None}, True),
        ({"Kind": 1, "code": "ABCD"}, False),
        ({"Kind": 1, "code": "a"}, False),
        ({}, False),
        ({"Kind": "b"}, False),
        ({"Kind": 1, "tree": {"right": {}}}, False),
        ({"Kind": 1, "rows": [10]}, False),
        ({"Kind": 1, "rows": 5}, False),
        ({"Kind": 1, "map": {"n": 5}}, False),
        ({"Kind": 1, "map": {"other": "x"}}, False),
        ({"Kind": 1, "more": 1}, False),
    ],
)
def test_schemas_inside_of_arguments_without_quotation_marks(
    tokenizer: Tokenizer, arguments: dict[str, Any], is_good: bool
) -> None:
    form = LANGUAGES["gemma4"]

    def token_of(text: str) -> int | None:
        added = tokenizer.backend.get_added_tokens_decoder()
        return found if (found := tokenizer.backend.token_to_id(text)) in added else None

    guide = form.free([Function("f", DEEP)], True, token_of)
    text = by_transformers("gemma4", "", [("f", arguments)]).replace("None", "null")
    assert matches(tokenizer, guide, text) == is_good, text
    assert not form.unguided(Function("f", DEEP))


def test_what_guides_of_braces_do_not_keep_is_said() -> None:
    properties = {
        "a": {"type": "string", "pattern": "^a|b$", "maxLength": 5},
        "b": {"type": "array", "minItems": 2},
        "c": {"enum": ["x", "y"], "minLength": 1},
        "d:": {"type": "string"},
        "e": {"type": "object", "minProperties": 1},
    }
    found = LANGUAGES["gemma4"].unguided(
        Function("f", {"type": "object", "properties": properties, "required": ["d:"]})
    )
    assert set(found) == {"pattern", "minItems", "minLength", "required", "minProperties"}


TEXTS = [
    ({"pattern": "^[a-z]+$"}, ["a", "xyz"], ["", "A", "a1", "a\nb"]),
    ({"pattern": "b/[^^]"}, ["ab/c", "b/\n\nc", "b//"], ["", "ab", "b/^"]),
    ({"pattern": "^(a|b)|c"}, None, []),
    ({"pattern": r"^\$[0-9]$"}, ["$5"], ["5", "$", "$55"]),
    ({"pattern": "^(?:x|y)"}, ["x", "yes"], ["z", ""]),
    ({"minLength": 2, "maxLength": 4}, ["ab", "é😀\n", "abcd", "<</>"], ["", "a", "abcde"]),
    ({"maxLength": 0}, [""], ["a"]),
    ({"minLength": 3, "pattern": "^a*$"}, ["aaa", "aaaa"], ["aa", "aab"]),
    ({"format": "date"}, ["2026-11-28"], ["2026-13-01", "today", "2026-11-28T"]),
    ({"format": "date-time"}, ["2026-11-28T15:00:00Z", "2026-11-28T15:00:00.5+01:00"], ["2026-11-28", "15:00:00Z"]),
    ({"format": "uuid"}, ["12345678-9abc-def0-1234-56789abcdef0"], ["12345678"]),
    ({"format": "email"}, None, []),
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(name for name, form in LANGUAGES.items() if isinstance(form, TaggedFormat)))
@pytest.mark.parametrize(("said", "good", "bad"), TEXTS)
def test_what_is_said_of_texts_without_quotation_marks(
    tokenizer: Tokenizer, name: str, said: dict[str, Any], good: list[str] | None, bad: list[str]
) -> None:
    """It is kept, or said to be left."""
    form = LANGUAGES[name]

    def token_of(text: str) -> int | None:
        added = tokenizer.backend.get_added_tokens_decoder()
        return found if (found := tokenizer.backend.token_to_id(text)) in added else None

    schema = {"type": "object", "properties": {"a": {"type": "string", **said}}, "additionalProperties": False}
    assert set(form.unguided(Function("f", schema))) == ({*said} if good is None else set())
    for guide in (
        form.free([Function("f", schema)], True, token_of),
        form.forced([Function("f", schema)], True, token_of),
    ):
        is_forced = guide == form.forced([Function("f", schema)], True, token_of)
        for texts, is_good in ((good or ["any"], True), (bad, False)):
            for text in texts:
                written = by_transformers(name, "", [("f", {"a": text})])
                written = written.removeprefix(form.prefix) if is_forced else written
                assert matches(tokenizer, guide, written) == is_good, text
    end = form.tags.value[1]
    if "minLength" in said:  # the reader ends the text at the first mark
        text = by_transformers(name, "", [("f", {"a": f"a{end}aaaaa"})])
        assert not matches(tokenizer, form.free([Function("f", schema)], True, token_of), text)
