"""/v1/chat/completions with reasoning and tools: messages and deltas in which they stand beside the content."""

import dataclasses
import json
import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from kvforge.gateway.answers.answer_reader import AnswerReader
from kvforge.gateway.answers.generation import Delta, Generation
from kvforge.gateway.answers.response_formats import ChatFormat, Choice, Parts, dumps
from kvforge.gateway.languages.call_events import CallBegins, Reasoning, Text
from kvforge.gateway.parsed_request import ParsedRequest

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 24
REASONING_NAMES = (b"reasoning_content", b"reasoning")
"""Clients read it under one of them."""


def call_id(prefix: str = "call_") -> str:
    """An id that no other call has."""
    return prefix + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


@dataclass
class Call:
    """A call that an answer makes; `arguments` as the inside of a JSON string. Streamed, it holds what is not sent."""

    id: str
    name: str
    arguments: bytearray = field(default_factory=bytearray)
    sent: bool = False


class _ReadChoice:
    """What is known of a choice beside its content; `reasoning` as the inside of a JSON string, streamed what is not
    sent of it."""

    def __init__(self, asked: ParsedRequest) -> None:
        self.reader = AnswerReader(asked)
        self.reasoning = bytearray()
        self.calls: list[Call] = []
        self.num_bytes = 0

    def take_reasoning(self) -> bytes:
        """The members that say it."""
        text, self.reasoning = bytes(self.reasoning), bytearray()
        return b",".join(b'"%b":"%b"' % (name, text) for name in REASONING_NAMES)


class ReadChatFormat(ChatFormat):
    """As ChatFormat, for an answer that may hold reasoning or calls."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._of_choice: dict[int, _ReadChoice] = {}

    def add(self, delta: Delta) -> None:
        own = self._of_choice.get(delta.index)
        if own is None:
            own = self._of_choice[delta.index] = _ReadChoice(self._asked)
        events = own.reader.push(delta.text, delta.finish_reason is not None)
        text = "".join(event.text for event in events if isinstance(event, Text))
        before = own.num_bytes
        for event in events:
            if isinstance(event, CallBegins):
                own.calls.append(Call(call_id(), event.name))
                own.num_bytes += len(event.name)
            elif not isinstance(event, Text):
                written = dumps(event.text)[1:-1].encode()
                place = own.reasoning if isinstance(event, Reasoning) else own.calls[-1].arguments
                place += written
                own.num_bytes += len(written)
        self.num_bytes += own.num_bytes - before
        whole = bool(own.calls) and not own.reader.is_cut
        reason = "tool_calls" if delta.finish_reason == "stop" and whole else delta.finish_reason
        super().add(dataclasses.replace(delta, text=text, finish_reason=reason))

    def _opening_content(self) -> bytes:
        return b'""' if self._asked.calls is None else b"null"

    def _changes(self, index: int, choice: Choice) -> list[bytes]:
        own = self._of_choice[index]
        changes = [own.take_reasoning()] if own.reasoning else []
        changes += [b'"content":"%b"' % choice.take_text()] if choice.text else []
        for position, call in enumerate(own.calls):
            if call.sent and not call.arguments:
                continue
            head = b"" if call.sent else f'"id":{dumps(call.id)},"type":"function",'.encode()
            name = b"" if call.sent else f'"name":{dumps(call.name)},'.encode()
            arguments, call.arguments = bytes(call.arguments), bytearray()
            call.sent = True
            changes.append(
                b'"tool_calls":[{"index":%d,%b"function":{%b"arguments":"%b"}}]' % (position, head, name, arguments)
            )
        self.num_bytes -= own.num_bytes
        own.num_bytes = 0
        return changes

    def _content(self, index: int, text: bytes) -> Parts:
        own = self._of_choice[index]
        calls = own.calls
        yield from (b'"message":{"role":"assistant","content":', b"null" if calls and not text else b'"%b"' % text)
        yield b',"refusal":null'
        if own.reasoning:
            for name in REASONING_NAMES:
                yield from (b',"%b":"' % name, own.reasoning, b'"')
        for position, call in enumerate(calls):
            head: dict[str, Any] = {"id": call.id, "type": "function"}
            yield b',"tool_calls":[' if position == 0 else b","
            yield f'{json.dumps(head)[:-1]}, "function":{{"name":{dumps(call.name)},"arguments":"'.encode()
            yield from (call.arguments, b'"}}')
        yield b"]}" if calls else b"}"


def chat_format(generation: Generation) -> ChatFormat:
    """How a chat's answer is written."""
    asked = generation.asked
    return ChatFormat(generation) if asked.calls is None and asked.thinking is None else ReadChatFormat(generation)
