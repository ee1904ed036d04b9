"""The system text and the messages of /v1/messages, which are made of blocks, as the messages of a chat."""

import json
from collections.abc import Iterator
from typing import Any

from kvforge.gateway.errors import bad_field
from kvforge.gateway.requests.messages.fields import BLOCK_FIELDS, BLOCK_WITHOUT_EFFECT, MESSAGE_FIELDS
from kvforge.gateway.requests.request_fields import Fields, flag, refuse_others

_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""The blocks that messages of each role may hold."""
ERROR = "Error: "
"""Stands before the result of a tool that failed: templates have no other place for that."""

Message = dict[str, Any]


def chat_messages(fields: Fields) -> list[Message]:
    """The chat's messages. Raises ApiError."""
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise bad_field("messages", "must be a list of at least one message")
    messages: list[Message] = []
    if system := _text("system", fields.get("system", "")):
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(given):
        messages += _messages(f"messages[{index}]", message)
    return messages


def without_later_system(messages: list[Message]) -> list[Message]:
    """The same for a template that takes a text of the system at the beginning only: what it says later is the end of
    the message before, where that is the user's, else a message of the user."""
    kept: list[Message] = []
    for message in messages:
        is_later = message["role"] == "system" and bool(kept)
        joins = is_later and kept[-1]["role"] in ("user", "system")
        if joins:
            kept[-1] = {**kept[-1], "content": f"{kept[-1]['content']}\n\n{message['content']}"}
        else:
            kept.append({"role": "user", "content": message["content"]} if is_later else message)
    return kept


def _messages(name: str, message: Any) -> Iterator[Message]:
    """Those of one message: a result of a tool is one of its own, and so is what follows an assistant's calls."""
    if not isinstance(message, dict):
        raise bad_field(name, "must be an object with role and content")
    refuse_others(name, message, MESSAGE_FIELDS)
    role = message.get("role")
    if not isinstance(role, str) or role not in _OF_ROLE:
        raise bad_field(f"{name}.role", f"must be one of {', '.join(_OF_ROLE)}")
    blocks = _blocks(f"{name}.content", message.get("content"), _OF_ROLE[role])
    return _assistant(blocks) if role == "assistant" else _others(role, blocks)


def _blocks(name: str, content: Any, kinds: tuple[str, ...]) -> list[tuple[str, Message]]:
    """Blocks with their names. Raises ApiError."""
    if isinstance(content, str):
        return [(name, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise bad_field(name, "must be text or a list of blocks")
    found = [(f"{name}[{index}]", block) for index, block in enumerate(content)]
    for place, block in found:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            what = "is no block" if not isinstance(kind, str) else f"is a block of type '{kind[:80]}'"
            raise bad_field(place, f"{what}; here the model reads only {', '.join(kinds)}")
        refuse_others(place, block, ("type", *BLOCK_FIELDS[kind], *BLOCK_WITHOUT_EFFECT[kind]))
    return found


def _others(role: str, blocks: list[tuple[str, Message]]) -> Iterator[Message]:
    text: str | None = None
    for name, block in blocks:
        if block["type"] == "text":
            text = (text or "") + _member(name, block, "text")
            continue
        if text is not None:
            yield {"role": role, "content": text}
        text = None
        yield _result(name, block)
    if text is not None or not blocks:
        yield {"role": role, "content": text or ""}


def _result(name: str, block: Message) -> Message:
    content = block.get("content")
    text = _text(f"{name}.content", "" if content is None else content)
    if flag({f"{name}.is_error": block.get("is_error") or False}, f"{name}.is_error"):
        text = f"{ERROR}{text}"
    return {"role": "tool", "tool_call_id": _member(name, block, "tool_use_id"), "content": text}


def _assistant(blocks: list[tuple[str, Message]]) -> Iterator[Message]:
    """What it thought, said and called, in this order, is one message; what comes otherwise begins another."""
    message: Message = {"role": "assistant", "content": ""}
    for name, block in blocks:
        kind = block["type"]
        has_calls = "tool_calls" in message
        if (kind == "text" and has_calls) or (kind == "thinking" and (has_calls or message["content"])):
            yield message
            message = {"role": "assistant", "content": ""}
        if kind == "text":
            message["content"] += _member(name, block, "text")
        elif kind == "thinking":
            thought = _member(name, block, "thinking")
            before = f"{message['reasoning_content']}\n" if message.get("reasoning_content") else ""
            message["reasoning_content"] = before + thought
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_call(name, block))
    yield message


def _call(name: str, block: Message) -> Message:
    if not isinstance(block.get("input"), dict):
        raise bad_field(f"{name}.input", "must be an object")
    arguments = json.dumps(block["input"], ensure_ascii=False)
    function = {"name": _member(name, block, "name"), "arguments": arguments}
    return {"id": _member(name, block, "id"), "type": "function", "function": function}


def _text(name: str, content: Any) -> str:
    """A text, or the texts of blocks of text together."""
    return "".join(_member(place, block, "text") for place, block in _blocks(name, content, ("text",)))


def _member(name: str, block: Message, member: str) -> str:
    value = block.get(member)
    if not isinstance(value, str):
        raise bad_field(f"{name}.{member}", "must be text")
    return value
