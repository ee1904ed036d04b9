"""Requests to /v1/messages as the chats that they are."""

from collections.abc import Callable
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.common.refusals import CONTEXT_LENGTH
from kvforge.gateway.errors import ApiError, bad_field
from kvforge.gateway.model import ServedModel
from kvforge.gateway.requests.messages.conversation import chat_messages, without_later_system
from kvforge.gateway.requests.messages.fields import (
    COUNT_WITHOUT_EFFECT,
    COUNTED,
    FORMAT_FIELDS,
    KNOWN,
    OUTPUT_FIELDS,
    REFUSED,
    SAME,
    WITHOUT_EFFECT,
)
from kvforge.gateway.requests.messages.thinking import ThinkingAsked, read_thinking
from kvforge.gateway.requests.messages.tools import read_tools
from kvforge.gateway.requests.request_fields import Fields, refuse_others, screen
from kvforge.gateway.requests.thinking import BUDGET, can_keep_budget
from kvforge.tokenization.chat_template import ChatTemplate

_NAMES = (("parameters", "input_schema"), ("stop", "stop_sequences"), ("response_format", "output_config.format"),
          ("reasoning_effort", "output_config.effort"), ("continue_final_message", "messages"),
          (BUDGET, "thinking.budget_tokens"))  # fmt: skip
"""Fields of chats, and what this endpoint calls them."""
USUAL_EFFORT = "high"
"""What Anthropic says to be the same as no effort given."""


def read_message_request(body: dict[str, Any], model: ServedModel, counted: bool) -> tuple[Fields, bool]:
    """The fields of the same request to /v1/chat/completions, and whether the answer leaves its thinking out.

    `counted`: it is only asked how many tokens the prompt has. Raises ApiError.
    """
    known, without_effect = (COUNTED, COUNT_WITHOUT_EFFECT) if counted else (KNOWN, WITHOUT_EFFECT)
    fields = screen(body, known, REFUSED, without_effect)
    if not counted and "max_tokens" not in fields:
        raise bad_field("max_tokens", "is missing; say how many tokens the answer may have")
    chat: Fields = {name: fields[name] for name in SAME if name in fields}
    chat["messages"] = chat_messages(fields)
    chat.update(read_tools(fields))
    is_later = any(message["role"] == "system" for message in chat["messages"][1:])
    if is_later and not _of_template(model, lambda template: template.takes_later_system(chat["tools"] or None)):
        chat["messages"] = without_later_system(chat["messages"])
    if "stop_sequences" in fields:
        if not isinstance(fields["stop_sequences"], list):
            raise bad_field("stop_sequences", "must be a list of texts")
        chat["stop"] = fields["stop_sequences"]
    if chat.get("stream") is True:
        chat["stream_options"] = {"include_usage": True}
    _go_on(chat)
    chat.update(_output(fields.get("output_config", {}), _reads(model, chat, "reasoning_effort")))
    asked = _thinking(fields, chat, model)
    if asked.arguments:
        chat["chat_template_kwargs"] = {**asked.arguments, **fields.get("chat_template_kwargs", {})}
    calls_are_free = bool(chat["tools"]) and chat["tool_choice"] == "auto"
    if asked.budget is not None and can_keep_budget(model, calls_are_free):
        chat[BUDGET] = asked.budget
    return chat, asked.is_omitted


def in_message_words(error: ApiError) -> ApiError:
    """A refusal of the chat in the names of this endpoint's fields."""
    param = error.param
    if param is None:
        return error
    if error.code == CONTEXT_LENGTH:
        return ApiError(error.status, f"prompt is too long: {error.message}", param, error.code, error.detail)
    if param.startswith("messages["):
        return error.renamed("messages", "an entry of 'messages'")
    param = param.replace(".function.", ".")
    for own, other in _NAMES:
        if param == own or param.startswith(f"{own}.") or param.endswith(f".{own}"):
            param = param.replace(own, other, 1)
            break
    return error.renamed(param, f"'{param}'")


def _go_on(chat: Fields) -> None:
    """Where the assistant has the last word, the answer goes on with it."""
    last = chat["messages"][-1]
    if last["role"] != "assistant":
        return
    if "tool_calls" in last:
        raise bad_field("messages", "end with a call of a tool; send its result")
    if chat["tool_choice"] not in ("auto", "none"):
        raise bad_field("tool_choice", "forces a call, but the last message is the assistant's, which is gone on with")
    chat.update({"continue_final_message": True, "add_generation_prompt": False})


def _output(config: Any, takes_effort: bool) -> Fields:
    """`output_config`: how much effort, and the form of the text."""
    if not isinstance(config, dict):
        raise bad_field("output_config", "must be an object with effort or format")
    refuse_others("output_config", config, OUTPUT_FIELDS)
    found: Fields = {}
    effort, form = config.get("effort"), config.get("format")
    if effort is not None and (takes_effort or effort != USUAL_EFFORT):
        found["reasoning_effort"] = effort
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            raise bad_field("output_config.format", 'must be {"type": "json_schema", "schema": {...}}')
        refuse_others("output_config.format", form, FORMAT_FIELDS)
        found["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    return found


def _thinking(fields: Fields, chat: Fields, model: ServedModel) -> ThinkingAsked:
    given = fields.get("chat_template_kwargs", {})
    asked = read_thinking(
        fields.get("thinking"), lambda name: _reads(model, chat, name), model.reasoning_format is not None
    )
    for name in asked.arguments:
        if isinstance(given, dict) and name in given:
            raise bad_field(f"chat_template_kwargs.{name}", "is what thinking says already; leave out one of them")
    if asked.arguments and not isinstance(given, dict):
        raise bad_field("chat_template_kwargs", "must be an object")
    return asked


def _reads(model: ServedModel, chat: Fields, name: str) -> bool:
    """Whether the template that writes this conversation reads a name."""
    return _of_template(model, lambda template: template.reads(name, chat["tools"] or None))


def _of_template(model: ServedModel, ask: Callable[[ChatTemplate], bool]) -> bool:
    """What is asked of the template; false where there is none for the conversation, which is said where it would be
    written."""
    if model.chat_template is None:
        return False
    try:
        return ask(model.chat_template)
    except KvforgeError:
        return False
