"""Conversations as text, and which characters of it are the assistant's."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.tokenization.chat_template import ChatTemplate

_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


def conversation(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a row as {"role", "content"}, from ``messages`` or from ShareGPT's ``conversations``
    ({"from", "value"}). Raises KvforgeError where they are neither."""
    key = "messages" if row.get("messages") is not None else "conversations"
    names = ("role", "content") if key == "messages" else ("from", "value")
    listed = row[key]
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise KvforgeError(f"{key} is not a list")
    messages = []
    for number, message in enumerate(listed, 1):
        role, content = (message.get(name) if isinstance(message, Mapping) else None for name in names)
        if not isinstance(role, str) or not isinstance(content, str):
            raise KvforgeError(f"message {number} has no {names[0]} and {names[1]} that are strings")
        if key == "conversations":
            if role not in _SHAREGPT_ROLES:
                raise KvforgeError(f"message {number} is from {role!r}, not from system, human or gpt")
            role = _SHAREGPT_ROLES[role]
        messages.append({"role": role, "content": content})
    return messages


def conversation_text(
    template: ChatTemplate, messages: Sequence[Mapping[str, str]], with_answers: bool
) -> tuple[str, list[tuple[int, int]] | None]:
    """Return the rendered conversation and the character spans [begin, end) of the assistant's turns (None unless
    ``with_answers``).

    A turn begins where the template's generation prompt ends and holds the mark that ends it, but not the white
    space after that mark, which a model never has to write.

    Raises:
        KvforgeError: the template refuses the messages, or writes a conversation other than by appending turns, so
            that its answers cannot be told apart.
    """
    if not messages:
        return "", None
    full = template.render(messages)
    if not with_answers:
        return full, None
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:index], add_generation_prompt=True)
        upto = template.render(messages[: index + 1])
        begin = len(before)
        if full.startswith(upto) and upto.startswith(before):
            turn = upto[begin:]
        else:
            turn = _turn_of_its_own(full[begin:] if full.startswith(before) else "", upto, message["content"])
            if not turn:
                raise KvforgeError(f"the chat template does not keep the text before message {index + 1} as it was")
        spans.append((begin, begin + len(turn.rstrip())))
    return full, spans


def _turn_of_its_own(rest: str, last: str, content: str) -> str:
    """Return what ``rest`` begins with, a turn of this content and the end that it has where it is the last one in
    ``last``: some templates put more before the content there, an empty thought for example. Empty if it does not."""
    for form in (content, content.lstrip("\n"), content.strip()):
        if form in last:
            turn = form + last[last.rindex(form) + len(form) :]
            if rest.startswith(turn):
                return turn
    return ""
