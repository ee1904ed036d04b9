"""What tools mean for one request: the guide of its answer, and how calls are read from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvforge.gateway.errors import ApiError, bad_field
from kvforge.gateway.languages.argument_values import types_of_members
from kvforge.gateway.languages.asked_forms import Calls
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.tool_formats import formats
from kvforge.gateway.model import ServedModel
from kvforge.gateway.requests.functions import Tools
from kvforge.gateway.requests.guides import guide_field, guided_decoding
from kvforge.gateway.requests.request_fields import Fields
from kvforge.gateway.requests.tool_guides import ToolGuide, guides_of_tools, refused_field
from kvforge.runtime.requests.guided_decoding import GuidedDecoding


@dataclass(frozen=True)
class ToolUse:
    """Attributes:
    calls: how calls are read; None where there can be none.
    guide: of the answer, and what it leaves of tools' schemas to the model; None for free text.
    field: the field that asks for the guide.
    looser: the guide to ask for where the engine refuses the first; None where that is the last word.
    """

    calls: Calls | None
    guide: ToolGuide | None
    field: str
    looser: ToolGuide | None = None


def tool_use(model: ServedModel, fields: Fields, tools: Tools | None) -> ToolUse:
    """What the answer to a request may be. Raises ApiError."""
    form = guided_decoding(fields)
    asked = ToolUse(None, None if form is None else ToolGuide(form, {}), guide_field(fields))
    if tools is None or not tools.functions:
        return asked
    if form is not None and tools.forced and asked.field != "response_format":
        raise bad_field("tool_choice", "forces a call, which excludes another form of the text; leave out one of them")
    if form is not None and not tools.forced:
        return asked
    written = model.tool_format
    if written is None:
        known = ", ".join(sorted(formats()))
        raise ApiError(
            400,
            f"how the model {model.name} writes calls of tools is not known from its chat template: start the server "
            f"with --tool-call-format NAME, one of {known}, or leave out tools",
            "tools",
            "no_tool_call_format",
        )
    types = {function.name: types_of_members(function.parameters) for function in tools.functions}
    prefix = written.prefix if tools.forced else ""
    tokens = tuple(sorted(model.marker_tokens(written.markers)))
    calls = Calls(written.name, types, prefix, tools.forced, tools.parallel, tokens)

    def make(functions: Sequence[Function]) -> GuidedDecoding:
        if tools.forced:
            return written.forced(functions, tools.parallel, model.marker_token)
        return written.free(functions, tools.parallel, model.marker_token)

    guide, looser = guides_of_tools(tools.functions, make, written.unguided)
    return ToolUse(calls, guide, "tools" if looser else refused_field(tools.functions), looser)
