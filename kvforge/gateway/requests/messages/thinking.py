"""`thinking` of /v1/messages as what chat templates are told of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvforge.gateway.errors import bad_field
from kvforge.gateway.requests.messages.fields import THINKING_FIELDS
from kvforge.gateway.requests.request_fields import integer, refuse_others
from kvforge.gateway.requests.sampling import MAX_TOKENS

SWITCHES = ("enable_thinking", "thinking")
"""The names under which templates take whether the model is to think."""
BUDGET = "thinking_budget"
"""The name under which some take how long."""
_TYPES = ("enabled", "adaptive", "disabled")
_DISPLAYS = ("summarized", "omitted")


@dataclass(frozen=True)
class ThinkingAsked:
    """What a request says of thinking: to the template, whether the answer leaves it out, and how many tokens of it
    there may be."""

    arguments: dict[str, Any]
    is_omitted: bool = False
    budget: int | None = None


def read_thinking(given: Any, reads: Callable[[str], bool], reasons: bool) -> ThinkingAsked:
    """`reads` says whether the template reads a name, `reasons` whether the model writes reasoning at all.

    A budget is what the model may use at most; a model that does not think keeps to every one. Raises ApiError: a
    model that always thinks cannot be told not to.
    """
    if given is None:
        return ThinkingAsked({})
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in _TYPES:
        raise bad_field("thinking.type", f"must be one of {', '.join(_TYPES)}")
    refuse_others("thinking", given, THINKING_FIELDS if kind == "enabled" else ("type", "display"))
    if given.get("display", "summarized") not in (None, *_DISPLAYS):
        raise bad_field("thinking.display", f"must be {_DISPLAYS[0]}, which shows all of it, or {_DISPLAYS[1]}")
    budget = None
    arguments: dict[str, Any] = {name: kind != "disabled" for name in SWITCHES if reads(name)}
    if kind == "disabled" and reasons and not arguments:
        raise bad_field("thinking.type", "cannot be disabled: the model's chat template has no switch for thinking")
    if kind == "enabled":
        budget = integer(
            {"thinking.budget_tokens": given.get("budget_tokens")}, "thinking.budget_tokens", 1, MAX_TOKENS
        )
        if budget is None:
            raise bad_field("thinking.budget_tokens", "is missing; say how many tokens the model may think for")
        if reads(BUDGET):
            arguments[BUDGET] = budget
    return ThinkingAsked(arguments, given.get("display") == "omitted", budget)
