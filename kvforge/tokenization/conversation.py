"""A conversation from whoever asks, checked and written by a chat template: the same for every way to an engine."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvforge.common.errors import KvforgeError, RequestError
from kvforge.tokenization.chat_template import OWN_NAMES, ChatTemplate
from kvforge.tokenization.cut_json import cut_object
from kvforge.tokenization.past_reasoning import REASONING, REASONING_LISTS, ReasoningError, past_reasoning

MAX_ARGUMENTS_BYTES = 16 << 10
"""Of the arguments of a template as JSON."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_OWN_NAMES = OWN_NAMES | {"chat_template", "continue_final_message"}
MESSAGE_FIELDS = ("role", "content", "refusal", "name", "tool_call_id", "tool_calls", *REASONING, *REASONING_LISTS)
MESSAGE_WITHOUT_EFFECT = {
    "annotations": "an answer's own notes on its text, which no template reads",
    "cache_control": "a hint; equal prefixes of prompts are kept in any case",
    "id": "a client's own name of a message, which no template reads",
    "parsed": "what a client made of the content",
    "provider_specific_fields": "what a provider said beside the message, which is for that provider",
}
EMPTY_MESSAGE_FIELDS = ("function_call", "audio")
"""What a message may have where it says nothing; other values are refused."""
PART_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of a message's parts, and the member of each that is its text."""
PART_WITHOUT_EFFECT = {
    "annotations": "an answer's own notes on its text, which no template reads",
    "logprobs": "an answer's own figures",
    "cache_control": MESSAGE_WITHOUT_EFFECT["cache_control"],
    "parsed": "what a client made of the text",
}
CALL_FIELDS = ("id", "type", "function")
CALL_WITHOUT_EFFECT = {"index": "the place of a call among those of a stream, which the list has"}
CALLED_FIELDS = ("name", "arguments")
CALLED_WITHOUT_EFFECT = {"parsed_arguments": "what a client made of the arguments"}


class FieldError(RequestError):
    """A part of a conversation that cannot be used: ``field`` is its name, ``what`` follows it in the sentence."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(what, field=field)


class TemplateRefusal(FieldError):
    """The template refuses the conversation; ``sentence`` is the template's own."""

    def __init__(self, sentence: str) -> None:
        RequestError.__init__(self, sentence.rstrip("."))
        self.sentence = sentence


TemplateId = Callable[[str, str | None], str]
"""The id of a call as a template takes it, from the id and the function's name; from the id alone where a result has
it. One for each conversation: it may remember what it was asked."""


def same_id(call_id: str, name: str | None = None) -> str:
    """The id of a call where a template takes it as it is."""
    return call_id


def render_conversation(
    template: ChatTemplate,
    messages: Any,
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_id: TemplateId = same_id,
) -> str:
    """Return the text of ``messages``, to be encoded without further special tokens.

    Args:
        messages: {"role", "content"} and what else OpenAI's messages have; content is text or a list of text parts.
        tools, arguments: as for ``ChatTemplate.render``; the arguments are checked already.
        continue_final_message: end where the last message's content ends, so that it is continued.
        template_id: a call's id as the template takes it, of this conversation.

    Raises:
        FieldError: a message cannot be used, or the template refuses the conversation.
    """
    checked = checked_messages(messages, template_id)
    _as_the_template_takes(checked, template, tools)
    if continue_final_message and add_generation_prompt:
        raise FieldError("continue_final_message", "excludes add_generation_prompt")
    try:
        if continue_final_message:
            return template.render_open(checked, tools, arguments)
        return template.render(checked, add_generation_prompt, tools, arguments)
    except KvforgeError as error:
        raise TemplateRefusal(str(error)) from None


def _as_the_template_takes(
    messages: Sequence[dict[str, Any]], template: ChatTemplate, tools: Sequence[Mapping[str, Any]] | None
) -> None:
    """Write the arguments of calls as JSON text where the template takes no objects."""
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    try:
        if functions and template.takes_arguments_as_text(tools):
            for function in functions:
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    except KvforgeError as error:
        raise TemplateRefusal(str(error)) from None


def checked_arguments(
    arguments: Any,
    template: ChatTemplate,
    tools: Sequence[Mapping[str, Any]] | None,
    taken: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what is said to the template beside messages and tools (``chat_template_kwargs``). ``taken`` are names
    that are given in another way. Raises FieldError."""
    if not isinstance(arguments, dict):
        raise FieldError("chat_template_kwargs", "must be an object")
    try:
        size = len(json.dumps(arguments, ensure_ascii=False).encode())
    except (TypeError, ValueError):
        raise FieldError("chat_template_kwargs", "must hold what JSON can hold") from None
    if size > MAX_ARGUMENTS_BYTES:
        raise FieldError("chat_template_kwargs", f"has {size} bytes as JSON; {MAX_ARGUMENTS_BYTES} are the most")
    for name in arguments:
        if name in _OWN_NAMES or name in template.special_tokens or name in taken:
            raise FieldError(f"chat_template_kwargs.{name[:80]}", "is given to the chat template already; leave it out")
        check_is_read(f"chat_template_kwargs.{name[:80]}", name, template, tools)
    return arguments


def check_is_read(field: str, name: str, template: ChatTemplate, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise FieldError where the template of a conversation with these tools does not read what ``field`` tells it
    under ``name``."""
    try:
        is_read = template.reads(name, tools)
    except KvforgeError as error:
        raise TemplateRefusal(str(error)) from None
    if not is_read:
        which = "" if len(template.sources) == 1 else f" {template.name_for(tools)}"
        raise FieldError(field, f"is not read by the model's chat template{which}; leave it out")


def checked_messages(value: Any, template_id: TemplateId = same_id) -> list[dict[str, Any]]:
    """Return messages as templates read them: text contents, calls whose arguments are objects. Raises FieldError."""
    if not isinstance(value, list) or not value:
        raise FieldError("messages", "must be a list of at least one message")
    return [_message(f"messages[{index}]", entry, template_id) for index, entry in enumerate(value)]


def _message(name: str, entry: Any, template_id: TemplateId) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise FieldError(name, "must be an object with role and content")
    for field in entry:  # of whatever value: a misspelt name must not go unnoticed
        if field not in (*MESSAGE_FIELDS, *EMPTY_MESSAGE_FIELDS, *MESSAGE_WITHOUT_EFFECT):
            raise FieldError(f"{name}.{field[:80]}", "is not known; remove it")
    for field in EMPTY_MESSAGE_FIELDS:
        if entry.get(field):
            raise FieldError(f"{name}.{field}", "is not supported; leave it out")
    if entry.get("role") not in ROLES:
        raise FieldError(f"{name}.role", f"must be one of {', '.join(ROLES)}")
    calls = _calls(f"{name}.tool_calls", entry, template_id)
    message: dict[str, Any] = {"role": entry["role"], "content": _said(name, entry)}
    if calls:
        message["tool_calls"] = calls
    for field in ("name", "tool_call_id"):
        if entry.get(field) is not None:
            if not isinstance(entry[field], str):
                raise FieldError(f"{name}.{field}", "must be text")
            message[field] = template_id(entry[field], None) if field == "tool_call_id" else entry[field]
    try:
        thought = past_reasoning(entry)
    except ReasoningError as error:
        raise FieldError(f"{name}.{error.refusal.field}", error.refusal.reason) from None
    return message if thought is None else {**message, **dict.fromkeys(REASONING, thought)}


def _said(name: str, entry: Mapping[str, Any]) -> str:
    """The text of a message. An assistant may have said nothing, beside its calls or where its answer ended in its
    reasoning; what it refused is what it said."""
    content, refusal = entry.get("content"), entry.get("refusal")
    if refusal is not None and not isinstance(refusal, str):
        raise FieldError(f"{name}.refusal", "must be text")
    if entry["role"] == "assistant" and content in (None, []):
        return refusal or ""
    text = _content(f"{name}.content", content)
    if refusal and text:
        raise FieldError(f"{name}.refusal", "excludes content: give one of them")
    return refusal or text


def _refuse_others(name: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for field, value in given.items():
        if field not in known and value is not None:
            raise FieldError(f"{name}.{field[:80]}", "is not known; remove it")


def _calls(name: str, entry: dict[str, Any], template_id: TemplateId) -> list[dict[str, Any]]:
    """A message's calls as templates read them: their arguments are objects."""
    given = entry.get("tool_calls") or []
    if not isinstance(given, list) or (given and entry["role"] != "assistant"):
        raise FieldError(name, "must be a list of the assistant's calls")
    calls = []
    for index, call in enumerate(given):
        function = (
            call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
        )
        if not isinstance(function, dict) or not all(isinstance(function.get(k), str) for k in ("name", "arguments")):
            raise FieldError(
                f"{name}[{index}]", 'must be {"id", "type": "function", "function": {"name", "arguments"}}'
            )
        _refuse_others(f"{name}[{index}]", call, (*CALL_FIELDS, *CALL_WITHOUT_EFFECT))
        _refuse_others(f"{name}[{index}].function", function, (*CALLED_FIELDS, *CALLED_WITHOUT_EFFECT))
        if not isinstance(call.get("id", ""), str):
            raise FieldError(f"{name}[{index}].id", "must be text")
        arguments = cut_object(function["arguments"] or "{}")
        if arguments is None:
            raise FieldError(f"{name}[{index}].function.arguments", "must be a JSON object as text")
        written = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append({"id": template_id(call["id"], function["name"]), **written} if "id" in call else written)
    return calls


def _content(name: str, content: Any) -> str:
    """A message's text; parts of type text are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise FieldError(name, "must be text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        text = part_text(part, PART_TEXTS)
        if text is None:
            raise FieldError(f"{name}[{index}]", "is no text part; the model reads only text")
        _refuse_others(f"{name}[{index}]", part, ("type", PART_TEXTS[part["type"]], *PART_WITHOUT_EFFECT))
        texts.append(text)
    return "".join(texts)


def part_text(part: Any, kinds: Mapping[str, str]) -> str | None:
    """The text of a part of one of these types, each with the member that is its text; None where it is no such."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kinds[kind]) if isinstance(kind, str) and kind in kinds else None
    return text if isinstance(text, str) else None
