"""What tools mean for one request: the guide of its answer, and how calls are read from it."""

from kvforge.common.errors import RequestError
from kvforge.gateway.engine_words import guide_refusal
from kvforge.gateway.errors import ApiError, bad_field
from kvforge.gateway.functions import Tools
from kvforge.gateway.guides import guide_field, guided_decoding
from kvforge.gateway.model import ServedModel
from kvforge.gateway.parsed_request import Calls
from kvforge.gateway.request_fields import Fields
from kvforge.gateway.tool_formats import formats
from kvforge.runtime.requests.guided_decoding import GuidedDecoding


def tool_calls(
    model: ServedModel, fields: Fields, tools: Tools | None
) -> tuple[Calls | None, GuidedDecoding | None, str]:
    """How to read calls, None where there can be none, the guide, and the field that asks for it. Raises ApiError."""
    form = guided_decoding(fields)
    if tools is None or not tools.functions:
        return None, form, guide_field(fields)
    if form is not None and tools.forced:
        raise bad_field("tool_choice", "forces a call, which excludes another form of the text; leave out one of them")
    if form is not None:
        return None, form, guide_field(fields)
    if model.tool_format is None:
        known = ", ".join(sorted(formats()))
        raise ApiError(
            400,
            f"how the model {model.name} writes calls of tools is not known from its chat template: start the server "
            f"with --tool-call-format NAME, one of {known}, or leave out tools",
            "tools",
            "no_tool_call_format",
        )
    names = tuple(function.name for function in tools.functions)
    prefix = model.tool_format.prefix if tools.forced else ""
    tokens = tuple(sorted(model.marker_tokens(model.tool_format.markers)))
    calls = Calls(model.tool_format.name, names, prefix, tools.forced, tools.parallel, tokens)
    try:
        if tools.forced:
            return calls, model.tool_format.forced(tools.functions, tools.parallel), "tools"
        return calls, model.tool_format.free(tools.functions, tools.parallel, model.marker_token), "tools"
    except RecursionError:
        raise bad_field("tools", "have parameters that are nested too deeply; flatten them") from None
    except RequestError as error:
        raise guide_refusal(str(error), "tools") from None
