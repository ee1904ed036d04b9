"""Guides that begin behind a model's reasoning, as data: what a guide of the kind ``after_reasoning`` holds."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.runtime.requests.guided_decoding import AFTER_REASONING, GuidedDecoding, guide_error

Mark = int | str
"""A token by its id, or a text in any tokens."""
_KIND, _GUIDE = "kind", "guide"
MAX_BREAKS = 16


@dataclass(frozen=True)
class ReasoningForm:
    """How an answer's reasoning is written, before a guided text.

    Attributes:
        opens, closes: what stands before the reasoning and behind it. The reasoning ends where the first mark of
            ``closes`` comes.
        begun: the prompt ends in the midst of it; else a text may also begin without any.
        repeats: more of it may follow.
        budget: the maximum of tokens between ``opens`` and ``closes``; None for any number. Needs a token for an end.
        breaks: the maximum of line breaks behind it.
        then: what comes between it, or the beginning of the text where there is none, and the guided text.
    """

    opens: tuple[Mark, ...]
    closes: tuple[Mark, ...]
    begun: bool = False
    repeats: bool = False
    budget: int | None = None
    breaks: int = 0
    then: tuple[Mark, ...] = ()


def after_reasoning(reasoning: ReasoningForm, guided: GuidedDecoding) -> GuidedDecoding:
    """The guide of texts with such reasoning before what ``guided`` allows. Raises RequestError as GuidedDecoding."""
    given = {**dataclasses.asdict(reasoning), _KIND: guided.kind, _GUIDE: guided.guide}
    return GuidedDecoding(AFTER_REASONING, json.dumps(given, ensure_ascii=False))


def parts_of(guided: GuidedDecoding) -> tuple[ReasoningForm, GuidedDecoding]:
    """The inverse of ``after_reasoning``. Raises RequestError where the guide is none of that kind."""
    given = _object(guided.guide or "")
    known = [field.name for field in dataclasses.fields(ReasoningForm)]
    for name in given:
        if name not in (*known, _KIND, _GUIDE):
            raise _wrong(f"has no {name[:80]!r}", f"give {', '.join((*known, _KIND, _GUIDE))}")
    opens, closes, then = (_marks(name, given.get(name, [])) for name in ("opens", "closes", "then"))
    begun, repeats = (given.get(name, False) for name in ("begun", "repeats"))
    budget, breaks = given.get("budget"), given.get("breaks", 0)
    if not isinstance(begun, bool) or not isinstance(repeats, bool):
        raise _wrong("has begun and repeats, true or false", "give no others")
    if not closes or not (opens or begun):
        raise _wrong("has closes, and opens where the prompt has not begun the reasoning", "give them")
    if not _is_number(breaks) or breaks > MAX_BREAKS:
        raise _wrong(f"allows 0 to {MAX_BREAKS} breaks", "give such a number")
    if budget is not None and not (_is_number(budget) and isinstance(closes[0], int)):
        raise _wrong("has a budget of 0 or more tokens only where closes begins with a token", "change it")
    if given.get(_KIND) == AFTER_REASONING:
        raise _wrong("holds another one", "give the inner guide")
    inner = GuidedDecoding(given.get(_KIND, ""), given.get(_GUIDE))
    return ReasoningForm(opens, closes, begun, repeats, budget, breaks, then), inner


def _object(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise _wrong("is a JSON object with opens, closes, kind and guide", "give one")
    return given


def _marks(name: str, given: Any) -> tuple[Mark, ...]:
    if not isinstance(given, list) or not all(_is_number(mark) or (isinstance(mark, str) and mark) for mark in given):
        raise _wrong(f"has a list of token ids and texts in {name}", "give one")
    return tuple(given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _wrong(what: str, remedy: str) -> RequestError:
    return guide_error(f"cannot be used: a guide {AFTER_REASONING} {what}", remedy)
