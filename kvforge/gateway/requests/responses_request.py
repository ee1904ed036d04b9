"""Requests to /v1/responses as the chats that they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvforge.common.sampling_fields import API_SAMPLING
from kvforge.gateway.errors import ApiError, bad_field
from kvforge.gateway.requests.request_fields import (
    REFUSED,
    RESPONSES_REFUSED,
    RESPONSES_WITHOUT_EFFECT,
    Fields,
    refuse_others,
    screen,
)
from kvforge.tokenization.conversation import PART_TEXTS, PART_WITHOUT_EFFECT, part_text

_SAMPLING = (*API_SAMPLING, "seed", "stop", "logit_bias", "stop_token_ids", "ignore_eos")
_SAME = (*_SAMPLING, "model", "stream", "parallel_tool_calls", "chat_template_kwargs")
KNOWN = frozenset({*_SAME, "input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "metadata",
                   "user", "reasoning"})  # fmt: skip
MAX_NAME, MAX_DESCRIPTION = 64, 4096
"""Characters of what is said of a format."""
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Entries of `metadata`, and characters of a key and of a value."""
ITEM_FIELDS: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "reasoning": ("content", "summary"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""The members of each type of input beside `type`."""
ITEM_WITHOUT_EFFECT = {
    "id": "it names an item of an earlier answer, and answers are not stored",
    "status": "it says how an item of an earlier answer ended",
    "parsed_arguments": "it is what a client made of the arguments",
}
_REASONING_PARTS = {"reasoning_text": "text", "summary_text": "text"}
OTHERS_TOOLS = frozenset({
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search", "image_generation",
    "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
})  # fmt: skip
"""Types of tools that are no functions. Beside functions the model is not told of them, and the answer says which."""
SCHEMA_FIELDS = ("type", "name", "description", "schema", "strict")
_FORMATS = ("text", "json_object", "json_schema")
_NAMES = (("messages", "input"), ("max_completion_tokens", "max_output_tokens"), ("response_format", "text.format"),
          ("reasoning_effort", "reasoning.effort"), ("tool_choice.allowed_tools", "tool_choice"))  # fmt: skip


@dataclass(frozen=True)
class ResponseRequest:
    """`chat`: the fields of the same request to /v1/chat/completions; `shown`: what the answer repeats of this one;
    `left_tools`: types of tools that the model is not told of."""

    chat: Fields
    shown: dict[str, Any]
    left_tools: tuple[str, ...] = ()


def read_response_request(body: dict[str, Any], max_text: int, defaults: Mapping[str, Any]) -> ResponseRequest:
    """What a body asks for; no text of what is shown may be longer than `max_text` characters. `defaults` are of
    sampling. Raises ApiError."""
    fields = screen(body, KNOWN, RESPONSES_REFUSED, RESPONSES_WITHOUT_EFFECT)
    chat: Fields = {name: fields[name] for name in _SAME if name in fields}
    instructions = fields.get("instructions")
    if not isinstance(instructions, str | None):
        raise bad_field("instructions", "must be text")
    if len(instructions or "") > max_text:
        raise bad_field("instructions", f"must be text of at most {max_text} characters, as the context is no longer")
    chat["messages"] = ([{"role": "system", "content": instructions}] if instructions else []) + _messages(fields)
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    form = _text_format(fields.get("text", {}))
    if form["type"] != "text":
        chat["response_format"] = _response_format(form)
    reasoning = _reasoning(fields.get("reasoning", {}))
    if reasoning["effort"] is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    tools, left_tools = _tools(fields.get("tools", []))
    functions = ({key: value for key, value in tool.items() if key != "type"} for tool in tools)
    chat["tools"] = [{"type": "function", "function": function} for function in functions]
    choice = fields.get("tool_choice", "auto")
    chat["tool_choice"] = _choice(choice)
    shown = {
        "instructions": instructions,
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": _metadata(fields.get("metadata", {})),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "reasoning": reasoning,
        "temperature": fields.get("temperature", defaults["temperature"]),
        "text": {"format": form},
        "tool_choice": choice,
        "tools": tools,
        "top_p": fields.get("top_p", defaults["top_p"]),
        "user": _user(fields.get("user")),
    }
    return ResponseRequest(chat, shown, left_tools)


def in_response_words(error: ApiError) -> ApiError:
    """A refusal of the chat in the names of this endpoint's fields."""

    def named(text: str) -> str:
        for own, other in _NAMES:
            text = text.replace(own, other)
        return text

    if error.param is None:
        return error
    param = named(error.param).replace(".function.", ".")
    if param.startswith("input["):
        return error.renamed("input", "an entry of 'input'", named)
    return error.renamed(param, f"'{param}'", named)


def _messages(fields: Fields) -> list[dict[str, Any]]:
    given = fields.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad_field("input", "must be text or a list of at least one item")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        message = _message(f"input[{index}]", item)
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
        if last and "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        elif message.keys() == {"role", "content"} and message["role"] == "assistant" and _is_thought(last):
            last["content"] = message["content"]
        else:
            messages.append(message)
    return messages


def _is_thought(message: dict[str, Any]) -> bool:
    """Whether a message is reasoning so far, whose content may follow."""
    return message.keys() == {"role", "content", "reasoning_content"} and not message["content"]


def _message(name: str, item: Any) -> dict[str, Any]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in ITEM_FIELDS:
        if kind == "item_reference":
            raise bad_field(name, "refers to an item, and none is stored: give the item itself (clients: store false)")
        raise bad_field(
            name,
            "must be a message, a reasoning, a function_call or a function_call_output; other items are not supported",
        )
    refuse_others(name, item, ("type", *ITEM_FIELDS[kind], *ITEM_WITHOUT_EFFECT))
    if kind == "message":
        return {"role": item.get("role"), "content": _content(f"{name}.content", item.get("content"))}
    if kind == "reasoning":
        texts = [_content(f"{name}.{field}", item.get(field) or "", _REASONING_PARTS) for field in ITEM_FIELDS[kind]]
        return {"role": "assistant", "content": "", "reasoning_content": texts[0] or texts[1]}
    if kind == "function_call":
        for field in ("call_id", "name", "arguments"):
            if not isinstance(item.get(field), str):
                raise bad_field(f"{name}.{field}", "must be text")
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if not isinstance(item.get("call_id"), str):
        raise bad_field(f"{name}.call_id", "must be text")
    content = _content(f"{name}.output", item.get("output"))
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _content(name: str, content: Any, kinds: Mapping[str, str] = PART_TEXTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(name, "must be text or a list of text parts")
    texts = [part_text(part, kinds) for part in content]
    for index, (part, text) in enumerate(zip(content, texts, strict=True)):
        if text is None:
            known = " or ".join(kind for kind in kinds if kind.endswith("_text"))
            raise bad_field(f"{name}[{index}]", f"is no {known}; the model reads only text")
        refuse_others(f"{name}[{index}]", part, ("type", kinds[part["type"]], *PART_WITHOUT_EFFECT))
    return "".join(filter(None, texts))


def _text_format(text: Any) -> dict[str, Any]:
    if not isinstance(text, dict):
        raise bad_field("text", "must be an object with a format")
    for name, value in text.items():
        if name == "verbosity" and value is not None and not REFUSED[name].asks_nothing(value):
            raise bad_field(f"text.{name}", f"is not supported: {REFUSED[name].reason}")
        if name not in ("format", "verbosity"):
            raise bad_field(f"text.{name[:80]}", "cannot be used; leave it out")
    form = {"type": "text"} if text.get("format") is None else text["format"]
    if not isinstance(form, dict) or form.get("type") not in _FORMATS:
        raise bad_field("text.format.type", f"must be {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}")
    if form["type"] == "json_schema" and not isinstance(form.get("schema"), dict):
        raise bad_field("text.format.schema", "must be a JSON schema, an object")
    _refuse_others("text.format", form, ("type",) if form["type"] != "json_schema" else SCHEMA_FIELDS)
    return form


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form["type"] == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form["schema"]}}


def _reasoning(reasoning: Any) -> dict[str, Any]:
    if not isinstance(reasoning, dict):
        raise bad_field("reasoning", "must be an object with an effort")
    for name, value in reasoning.items():
        if name in ("summary", "generate_summary") and value == "auto":
            continue  # the reasoning itself is returned, and it is for the server to choose
        if name != "effort" and value is not None:
            raise bad_field(f"reasoning.{name[:80]}", "cannot be used: no summary is written; leave it out")
    return {"effort": reasoning.get("effort"), "summary": None}


def _tools(given: Any) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The functions, and the types of what else there is beside them. Without any function all that the request offers
    the model would be missing, and so it is refused."""
    if not isinstance(given, list):
        raise bad_field("tools", "must be a list of functions")
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in given]
    for index, kind in enumerate(kinds):
        if kind != "function" and (not isinstance(kind, str) or kind not in OTHERS_TOOLS or "function" not in kinds):
            what = "is no function: tools that the server would have to run, and free-form ones, are not supported"
            raise bad_field(f"tools[{index}]", what)
    functions = [tool for tool, kind in zip(given, kinds, strict=True) if kind == "function"]
    return functions, tuple(sorted({kind for kind in kinds if kind is not None} - {"function"}))


def _choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        refuse_others("tool_choice", choice, ("type", "mode", "tools"))
        tools = choice.get("tools")
        if not isinstance(tools, list):
            raise bad_field("tool_choice.tools", 'must be a list of {"type": "function", "name": ...}')
        named = [_choice(tool) if isinstance(tool, dict) else None for tool in tools]
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": named}}
    if kind != "function" or not isinstance(choice.get("name"), str):
        raise bad_field(
            "tool_choice",
            'must be none, auto, required, any, {"type": "function", "name": ...} or {"type": "allowed_tools", '
            '"mode": ..., "tools": [...]}',
        )
    refuse_others("tool_choice", choice, ("type", "name"))
    return {"type": "function", "function": {"name": choice["name"]}}


def _refuse_others(name: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    """What the answer repeats is bounded by what is known."""
    for field, value in given.items():
        if field not in known:
            raise bad_field(f"{name}.{field[:80]}", "is not known; remove it")
        if field in ("name", "description") and value is not None:
            most = MAX_NAME if field == "name" else MAX_DESCRIPTION
            if not isinstance(value, str) or len(value) > most:
                raise bad_field(f"{name}.{field}", f"must be text of at most {most} characters")
        if field == "strict" and not isinstance(value, bool | None):
            raise bad_field(f"{name}.{field}", "must be true or false")


def _metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or len(metadata) > MAX_METADATA:
        raise bad_field("metadata", f"must be an object of at most {MAX_METADATA} texts")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > MAX_KEY or len(value) > MAX_VALUE:
            what = f"must hold texts of at most {MAX_VALUE} characters under keys of at most {MAX_KEY}"
            raise bad_field("metadata", what)
    return metadata


def _user(user: Any) -> str | None:
    if user is not None and (not isinstance(user, str) or len(user) > MAX_VALUE):
        raise bad_field("user", f"must be text of at most {MAX_VALUE} characters")
    return user
