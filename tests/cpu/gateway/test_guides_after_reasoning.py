"""Guides that begin behind the reasoning: any reasoning, its end, and then what the guide allows and nothing else."""

import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from kvforge.gateway.answers.answer_reader import AnswerReader
from kvforge.gateway.languages.asked_forms import Calls, Thinking
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.grammar_format import GrammarFormat
from kvforge.gateway.languages.marked_text import TOKEN
from kvforge.gateway.languages.reasoning_formats import reasoning_formats
from kvforge.gateway.languages.tool_formats import formats
from kvforge.gateway.parsed_request import ParsedRequest
from kvforge.runtime.guides.judgement import judged
from kvforge.runtime.guides.matchers import make_matcher, make_vocabulary
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from kvforge.runtime.requests.reasoning import after_reasoning
from kvforge.runtime.text.tokenizer import Tokenizer
from tests.cpu.gateway.events import put_together
from tests.cpu.gateway.language_templates import by_transformers
from tests.support.models.checkpoints import write_byte_tokenizer

REASONING, TOOLS = reasoning_formats(), formats()
MARKS = sorted({mark for form in (*REASONING.values(), *TOOLS.values()) for mark in form.markers})
EOS = 2
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GUIDES = {
    "json": (GuidedDecoding("json"), ['{"a": [1]}', "{}"], ["[1]", '"a"', "x"]),
    "json_schema": (GuidedDecoding("json_schema", SCHEMA), ['{"a": 1}'], ["{}", '{"a": "x"}', "so {"]),  # type: ignore[arg-type]
    "regex": (GuidedDecoding("regex", "(yes|no)/?"), ["yes", "no/"], ["ye", "maybe", "yes!"]),
    "gbnf": (GuidedDecoding("ebnf_grammar", 'root ::= "a" b\nb ::= "{" | "}"'), ["a{", "a}"], ["a", "ab"]),
    "lark": (GuidedDecoding("ebnf_grammar", 'start: "a" TEXT\nTEXT: /[0-9]+/'), ["a12"], ["a", "a1b"]),
    "tag": (
        GuidedDecoding("structural_tag", {"triggers": ["<f"], "structures": [  # type: ignore[arg-type]
            {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}),
        ["text", 'so <f>{"a": 1}</f>.'], ["so <f>{}</f>", "<f"],
    ),
}  # fmt: skip
PARTS = ["a", "é", "😀", "\n", " ", '"', "{", "}", "<", "</", "<thi", "analysis", "yes", '{"a": 1}']


@dataclass
class Asked:
    """A tokenizer that has the marks as tokens, special or not, or as text."""

    tokenizer: Tokenizer
    kind: str

    def __post_init__(self) -> None:
        self.vocabulary = make_vocabulary(self.tokenizer, [EOS])
        added = self.tokenizer.backend.get_added_tokens_decoder()
        self.special = {token.content for token in added.values() if token.special}
        self.no_text = {token.content for token in added.values()}

    def token_of(self, text: str) -> int | None:
        found = self.tokenizer.backend.token_to_id(text)
        return found if found in self.tokenizer.backend.get_added_tokens_decoder() else None

    def matcher(self, guide: GuidedDecoding) -> Any:
        verdict = judged(guide, self.vocabulary, self.special.__contains__, self.no_text)
        return make_matcher(self.vocabulary, *verdict.accepted())

    def may_end(self, matcher: Any, text: str) -> list[bool] | None:
        """Where the text may end: at its beginning and after each token; None where it is not allowed."""
        matcher = matcher.deep_copy()
        found = [matcher.is_accepting()]
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if matcher.try_consume_tokens([token]) != 1:
                return None
            found.append(matcher.is_accepting())
        return found


@pytest.fixture(scope="module", params=["text", "added", "special"])
def asked(request, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path)
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer is not None
    if request.param != "text":
        special = request.param == "special"
        tokenizer.backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in MARKS])
    return Asked(tokenizer, request.param)


def behind(asked: Asked, name: str, guide: GuidedDecoding, begun: bool = False, **how: Any) -> GuidedDecoding:
    form = REASONING[name]
    content, budget = how.get("content", form.content), how.get("budget")
    return after_reasoning(form.before(content, begun, budget, MARKS, asked.token_of), guide)


def content_of(tools: str, reasoning: str) -> str:
    """How a forced call begins."""
    form = TOOLS[tools]
    return form.prefix if form.writes_reasoning else REASONING[reasoning].content + form.prefix


def any_thought(rng: random.Random, without: str) -> str:
    """Text that does not hold this, in letters or as the beginning of it."""
    text = "".join(rng.choices(PARTS, k=rng.randrange(12)))
    return text.replace(without, "").rstrip("<")


def around(name: str) -> tuple[str, str]:
    form = REASONING[name]
    return (form.begins, form.ends) if form.around is None else form.around


@pytest.mark.parametrize("kind", GUIDES)
@pytest.mark.parametrize("name", REASONING)
def test_reasoning_and_then_what_the_guide_allows(asked: Asked, name: str, kind: str) -> None:
    """20 random thoughts for each of 3 tokenizers, each format and each kind of guide, begun by the prompt and not."""
    guide, good, bad = GUIDES[kind]
    opens, closes = around(name)
    form, rng = REASONING[name], random.Random(f"{name} {kind}")
    for begun in (False, True):
        matcher = asked.matcher(behind(asked, name, guide, begun))
        for _ in range(20):
            before = ("" if begun else opens) + any_thought(rng, closes) + closes
            blank = "\n" * rng.randrange(form.breaks + 1)
            for text in good:
                ends = asked.may_end(matcher, before + blank + form.content + text)
                assert ends is not None and ends[-1], (before, text)
                within = len(asked.tokenizer.encode(before, add_special_tokens=False))
                if begun or kind != "tag" or asked.kind != "text":  # of which the reasoning may be a part
                    assert not any(ends[not begun : within]), "nothing ends before the reasoning does"
            for text in bad:
                ends = asked.may_end(matcher, before + blank + form.content + text)
                assert ends is None or not ends[-1], (before, text)
        at_once = [asked.may_end(matcher, form.content + text) for text in good]
        assert all(ends is not None and ends[-1] for ends in at_once) == (not begun), "only where it may be left out"
        if form.repeats:
            twice = 2 * (opens + "so" + closes)
            ends = asked.may_end(matcher, twice.removeprefix(opens if begun else "") + form.content + good[0])
            assert ends is not None and ends[-1]


@pytest.mark.parametrize("name", REASONING)
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_ends_the_reasoning(asked: Asked, name: str, budget: int) -> None:
    form = REASONING[name]
    assert form.ends_with_token(asked.token_of) == (asked.kind != "text")
    if asked.kind == "text":
        return
    opens, closes = around(name)
    for begun in (False, True):
        matcher = asked.matcher(behind(asked, name, GUIDES["json"][0], begun, budget=budget))
        for size in range(8):
            ends = asked.may_end(matcher, ("" if begun else opens) + "x" * size + closes + form.content + "{}")
            assert (ends is not None and ends[-1]) == (size <= budget)


FUNCTIONS = (Function("f", SCHEMA), Function("g", {"type": "object", "additionalProperties": False}))
PAIRS = [
    (tools, reasoning) for reasoning in REASONING for tools in TOOLS if (tools == "harmony") <= (reasoning == tools)
]


@pytest.mark.parametrize(("tools", "reasoning"), PAIRS)
def test_calls_come_behind_the_reasoning(asked: Asked, tools: str, reasoning: str) -> None:
    """Forced ones, whose beginning the guide then writes, and free ones in any text."""
    form, (opens, closes) = TOOLS[tools], around(reasoning)
    content = REASONING[reasoning].content
    rng = random.Random(tools)

    def call(arguments: dict[str, Any]) -> str:
        if tools == "harmony":
            return f"{form.prefix}f<|message|>{json.dumps(arguments)}"
        return by_transformers(tools, "", [("f", arguments)])

    for parallel in (True, False):
        inner = form.forced(FUNCTIONS, parallel, asked.token_of)
        forced = asked.matcher(behind(asked, reasoning, inner, content=content_of(tools, reasoning)))
        for before in ("", *(opens + any_thought(rng, closes) + closes for _ in range(5))):
            rest = call({"a": 5})
            assert rest.startswith(form.prefix)
            head = content_of(tools, reasoning).removesuffix(form.prefix)
            rest = rest if isinstance(form, GrammarFormat) else rest[: rest.rindex("}") + 1 + bool(form.notation.opens)]
            ends = asked.may_end(forced, before + head + rest)
            assert ends is not None and ends[-1] and not any(ends[:-1]), (before, rest)
            ends = asked.may_end(forced, before + head + call({"a": "x"}))
            assert ends is None or not ends[-1]
            ends = asked.may_end(forced, before + "hello")
            assert ends is None or not ends[-1]
        if form.writes_reasoning:
            continue
        free = asked.matcher(behind(asked, reasoning, form.free(FUNCTIONS, parallel, asked.token_of)))
        for before in ("", *(opens + any_thought(rng, closes) + closes for _ in range(5))):
            for text in ("", "hello", "so: " + call({"a": 5})):
                ends = asked.may_end(free, before + content + text)
                assert ends is not None and ends[-1], (before, text)
            if tools != "pythonic":  # whose calls have no mark
                ends = asked.may_end(free, before + content + call({"a": "x"}))
                assert ends is None or not ends[-1], before


def written(asked: Asked, guide: GuidedDecoding, rng: random.Random) -> str:
    """A text of tokens drawn among those that may follow, as answers are read: marks that are tokens are marked. What
    ends the reasoning is drawn often."""
    marks = {token: mark for mark in MARKS if (token := asked.token_of(mark)) is not None}
    ends = {token for form in REASONING.values() if (token := asked.token_of(around(form.name)[1])) is not None}
    ends |= {token for token, mark in marks.items() if mark == "<|end|>"}
    matcher, text, waiting = asked.matcher(guide), "", list[int]()
    for _ in range(5000):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little", count=asked.vocabulary.vocab_size))
        allowed = allowed[allowed != EOS]
        if matcher.is_accepting() and (not len(allowed) or rng.random() < 0.5):
            return text + asked.tokenizer.backend.decode(waiting, skip_special_tokens=False)
        likely = [token for token in allowed if token in ends]
        token = int(rng.choice(likely if likely and rng.random() < 0.2 else list(allowed)))
        matcher.consume_token(token)
        waiting.append(token)
        if token in marks:
            text += asked.tokenizer.backend.decode(waiting[:-1], skip_special_tokens=False) + TOKEN + marks[token]
            waiting = []
    raise AssertionError("the text does not end")


@pytest.mark.parametrize(("tools", "reasoning"), PAIRS)
def test_what_a_guide_writes_is_read_as_it_should_be(asked: Asked, tools: str, reasoning: str) -> None:
    """Forced calls behind reasoning, both at random: the reasoning and one or more calls, and nothing else."""
    if asked.kind == "text":
        return
    form, rng = TOOLS[tools], random.Random(f"{tools} {reasoning}")
    inner = form.forced(FUNCTIONS, True, asked.token_of)
    tokens = tuple(mark for mark in form.markers if asked.token_of(mark) is not None)
    for begun in (False, True) if REASONING[reasoning].begins else (False,):
        guide = behind(asked, reasoning, inner, begun, content=content_of(tools, reasoning))
        thinking = Thinking(reasoning, begun, {mark: 0 for mark in REASONING[reasoning].markers})
        calls = Calls(tools, {"f": {"a": ["number"]}, "g": {}}, "", True, True, tokens)
        request = ParsedRequest(b"", (), 1, (), None, False, False, calls=calls, thinking=thinking)
        for _ in range(4):
            text = written(asked, guide, rng)
            reader = AnswerReader(request)
            _, content, found = put_together([*reader.push(text, False), *reader.push("", True)])
            assert not content.strip() and found, text
            for name, arguments in found:
                assert set(json.loads(arguments)) == ({"a"} if name == "f" else set()), text


def test_what_is_no_such_guide_is_refused(asked: Asked) -> None:
    good = json.loads(behind(asked, "think", GUIDES["json"][0]).guide or "")
    for change, words in (
        ({"opens": [1.5]}, "token ids and texts in opens"),
        ({"opens": []}, "opens where the prompt"),
        ({"closes": []}, "has closes"),
        ({"closes": [""]}, "token ids and texts in closes"),
        ({"begun": 1}, "true or false"),
        ({"breaks": 17}, "0 to 16 breaks"),
        ({"budget": -1}, "has a budget"),
        ({"budget": 5, "closes": ["x"]}, "has a budget"),
        ({"kind": "after_reasoning"}, "holds another one"),
        ({"kind": "odd"}, "is of kind 'odd'"),
        ({"kind": "regex", "guide": "("}, "cannot be used"),
        ({"odd": 1}, "has no 'odd'"),
        ({"closes": [10**9]}, "cannot be used"),
    ):
        verdict = judged(GuidedDecoding("after_reasoning", {**good, **change}), asked.vocabulary, set().__contains__)  # type: ignore[arg-type]
        assert verdict.refusal is not None and words in str(verdict.refusal), change
    for text in ("", "[]", "{", "5"):
        if text:
            verdict = judged(GuidedDecoding("after_reasoning", text), asked.vocabulary, set().__contains__)
            assert verdict.refusal is not None and "is a JSON object" in verdict.refusal.reason
