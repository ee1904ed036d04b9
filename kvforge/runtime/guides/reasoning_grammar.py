"""Grammars of a model's reasoning and a guided text behind it, in llguidance's Lark dialect."""

import json
from collections.abc import Sequence

from kvforge.runtime.requests.reasoning import Mark, ReasoningForm

_ANY = "ANY: /(.|\\n)*/"


def grammar_behind(reasoning: ReasoningForm, grammar: str) -> str:
    """The grammar of texts with such reasoning before what ``grammar``, one of llguidance's, allows. Special tokens and
    others that llguidance takes for no text are no reasoning."""
    text_ends = isinstance(reasoning.closes[0], str)  # and is in the rule `thought`
    opens, closes, then = map(_spelled, (reasoning.opens, reasoning.closes[text_ends:], reasoning.then))
    blank = f"BREAK{{0,{reasoning.breaks}}}" if reasoning.breaks else ""
    rest = f"thought {closes} {blank}"
    more = f"({opens} {rest})"
    before = f"{rest} {more if reasoning.repeats else ''}{'*' if reasoning.repeats else ''}"
    if not reasoning.begun:
        before = f"{more}{'*' if reasoning.repeats else '?'}"
    rules = [f"start: {before} {then} guided", f"guided: {_embedded(grammar)}", _thought(reasoning), _ANY]
    return "\n".join([*rules, *(['BREAK: "\\n"'] if blank else [])]) + "\n"


def _thought(reasoning: ReasoningForm) -> str:
    """The rule of the reasoning, with the first mark of its end where this is a text."""
    if isinstance(reasoning.closes[0], str):
        return f"thought[lazy]: ANY {_spelled(reasoning.closes[:1])}"
    return "thought: ANY" if reasoning.budget is None else f"thought[max_tokens={reasoning.budget}]: ANY"


def _spelled(marks: Sequence[Mark]) -> str:
    return " ".join(f"<[{mark}]>" if isinstance(mark, int) else json.dumps(mark, ensure_ascii=False) for mark in marks)


def _embedded(grammar: str) -> str:
    """A whole grammar as a part of a rule."""
    inner = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    if inner.get("json_schema") is not None:
        return f"%json {json.dumps(inner['json_schema'], ensure_ascii=False)}"
    return f"%lark {{\n{inner['lark_grammar']}\n}}"
