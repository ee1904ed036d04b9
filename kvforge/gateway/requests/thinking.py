"""What reasoning means for one request: how it is read, and what becomes of a guide that begins behind it."""

from dataclasses import replace

from kvforge.common.errors import RequestError
from kvforge.gateway.client_words import GUIDE, api_error
from kvforge.gateway.errors import bad_field
from kvforge.gateway.languages.asked_forms import Thinking
from kvforge.gateway.languages.tool_formats import formats
from kvforge.gateway.model import ServedModel
from kvforge.gateway.requests.request_fields import Fields, integer
from kvforge.gateway.requests.sampling import MAX_TOKENS
from kvforge.gateway.requests.tool_guides import ToolGuide
from kvforge.gateway.requests.tool_use import ToolUse
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from kvforge.runtime.requests.reasoning import ReasoningForm, after_reasoning

BUDGET = "thinking_token_budget"
_ANY_TEXT = GuidedDecoding("ebnf_grammar", "start: TEXT\nTEXT: /(.|\\n)*/\n")


def has_begun(model: ServedModel, prompt: str, continued: str | None = None) -> bool | None:
    """Whether a prompt has begun the reasoning of its answer; None where it is over, or where the model has none.
    ``continued`` is the prompt's last message if the answer goes on with that."""
    form = model.reasoning_format
    if form is None:
        return None
    if continued is not None:
        is_inside = bool(form.begins) and continued.lstrip().startswith(form.begins) and form.ends not in continued
        return True if is_inside else None
    end = prompt.rstrip()
    if form.begins and end.endswith(form.begins.rstrip()):
        return True
    return None if form.ends and end.endswith(form.ends) else False


def thinking(model: ServedModel, begun: bool | None) -> Thinking | None:
    """How to read the reasoning of an answer to a prompt of which ``has_begun`` says this; None where the model has
    none."""
    form = model.reasoning_format
    return None if form is None else Thinking(form.name, begun is True, model.marker_tokens(form.markers))


def behind_reasoning(model: ServedModel, fields: Fields, use: ToolUse, begun: bool | None) -> ToolUse:
    """The same with guides that begin behind the reasoning, where the answer may have some and either a guide or a
    budget is asked for. A call that is forced is then begun by the guide and not by the prompt.

    Raises:
        ApiError: `thinking_token_budget` cannot be kept.
    """
    budget = _budget(model, fields)
    form, calls = model.reasoning_format, use.calls
    written = None if calls is None else formats()[calls.format]
    is_free = calls is not None and not calls.forced
    if is_free and written is not None and written.writes_reasoning:
        if budget is not None:
            raise bad_field(BUDGET, "excludes tools with this model, unless a call is forced; leave out one of them")
        return use
    if form is None or begun is None or (use.guide is None and budget is None):
        return use
    content = form.content + ("" if calls is None else calls.prefix)
    if calls is not None and written is not None and written.writes_reasoning:
        content = calls.prefix  # a message of its own
    markers = form.markers if written is None else {*form.markers, *written.markers}
    reasoning = form.before(content, begun, budget, markers, model.marker_token)
    guide = ToolGuide(_ANY_TEXT, {}) if use.guide is None else use.guide
    return replace(
        use,
        calls=None if calls is None else replace(calls, prefix=""),
        guide=_behind(reasoning, guide, use.field),
        looser=None if use.looser is None else _behind(reasoning, use.looser, use.field),
    )


def can_keep_budget(model: ServedModel, calls_are_free: bool) -> bool:
    """Whether `behind_reasoning` keeps a budget; `calls_are_free`: tools are given, and no call is forced."""
    form, written = model.reasoning_format, model.tool_format
    if calls_are_free and written is not None and written.writes_reasoning:
        return False
    return form is not None and form.ends_with_token(model.marker_token)


def _budget(model: ServedModel, fields: Fields) -> int | None:
    budget = integer(fields, BUDGET, 0, MAX_TOKENS)
    form = model.reasoning_format
    if budget is not None and form is None:
        raise bad_field(BUDGET, "needs a model whose reasoning is known; see the server's --reasoning-format")
    if budget is not None and form is not None and not form.ends_with_token(model.marker_token):
        raise bad_field(BUDGET, "needs a model whose reasoning ends with one token, and this one's does not")
    return budget


def _behind(reasoning: ReasoningForm, guide: ToolGuide, field: str) -> ToolGuide:
    try:
        return replace(guide, guide=after_reasoning(reasoning, guide.guide))
    except RequestError as error:
        raise api_error(error.refusal, {GUIDE: field}) from None
