"""/v1/chat/completions with tools: messages and deltas in which calls stand beside the text."""

import json
import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from kvforge.gateway.call_events import Arguments, CallBegins, Event, Text
from kvforge.gateway.call_reader import CallReader
from kvforge.gateway.generation import Delta, Generation
from kvforge.gateway.parsed_request import Calls
from kvforge.gateway.response_formats import ChatFormat, Choice, Parts, dumps
from kvforge.gateway.tool_formats import formats

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 24


def call_id() -> str:
    """An id that no other call has."""
    return "call_" + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


@dataclass
class Call:
    """A call that an answer makes; `arguments` as the inside of a JSON string. Streamed, it holds what is not sent."""

    id: str
    name: str
    arguments: bytearray = field(default_factory=bytearray)
    sent: bool = False


class CallCollector:
    """Tells a growing answer's text and calls apart."""

    def __init__(self, asked: Calls) -> None:
        form = formats()[asked.format]
        notation = form.notation.with_tokens(asked.tokens)
        all_guided = asked.forced or form.notation.begins in asked.tokens
        heads = None if all_guided else {form.head(name): name for name in asked.names}
        self._reader = CallReader(notation, frozenset(asked.names), asked.forced, heads)
        self._parallel = asked.parallel
        self._num_calls = 0
        self._unsaid = asked.prefix
        """What the prompt says of the answer already, which is no content where no call follows."""
        self._reader.push(asked.prefix.replace(form.notation.begins, notation.begins))

    @property
    def is_cut(self) -> bool:
        """The last call that counts lacks some of its arguments."""
        return self._reader.in_call and (self._parallel or self._num_calls == 1)

    def push(self, text: str, ended: bool) -> list[Event]:
        """The events of a piece; only the first call's where several are not wanted."""
        events = self._reader.push(text) + (self._reader.end() if ended else [])
        kept = []
        for event in events:
            self._num_calls += isinstance(event, CallBegins)
            if isinstance(event, Text) and self._unsaid:
                event, self._unsaid = Text(event.text.removeprefix(self._unsaid)), ""
            if isinstance(event, Text) or self._parallel or self._num_calls == 1:
                kept.append(event)
        return kept


class _ToolChoice:
    def __init__(self, asked: Calls) -> None:
        self.collector = CallCollector(asked)
        self.calls: list[Call] = []
        self.num_bytes = 0


class ToolChatFormat(ChatFormat):
    """As ChatFormat, for a request with functions that may be called."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        assert generation.asked.calls is not None
        self._calls = generation.asked.calls
        self._of_choice: dict[int, _ToolChoice] = {}

    def add(self, delta: Delta) -> None:
        own = self._of_choice.setdefault(delta.index, _ToolChoice(self._calls))
        events = own.collector.push(delta.text, delta.finish_reason is not None)
        text = "".join(event.text for event in events if isinstance(event, Text))
        before = own.num_bytes
        for event in events:
            if isinstance(event, CallBegins):
                own.calls.append(Call(call_id(), event.name))
                own.num_bytes += len(event.name)
            elif isinstance(event, Arguments):
                written = dumps(event.text)[1:-1].encode()
                own.calls[-1].arguments += written
                own.num_bytes += len(written)
        self.num_bytes += own.num_bytes - before
        whole = bool(own.calls) and not own.collector.is_cut
        reason = "tool_calls" if delta.finish_reason == "stop" and whole else delta.finish_reason
        super().add(Delta(delta.index, text, delta.logprobs, reason, delta.stop_reason, delta.more))

    def _opening_content(self) -> bytes:
        return b"null"

    def _changes(self, index: int, choice: Choice) -> list[bytes]:
        own = self._of_choice[index]
        changes = [b'"content":"%b"' % choice.take_text()] if choice.text else []
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
        calls = self._of_choice[index].calls
        yield from (b'"message":{"role":"assistant","content":', b"null" if calls and not text else b'"%b"' % text)
        yield b',"refusal":null'
        for position, call in enumerate(calls):
            head: dict[str, Any] = {"id": call.id, "type": "function"}
            yield b',"tool_calls":[' if position == 0 else b","
            yield f'{json.dumps(head)[:-1]}, "function":{{"name":{dumps(call.name)},"arguments":"'.encode()
            yield from (call.arguments, b'"}}')
        yield b"]}" if calls else b"}"


def chat_format(generation: Generation) -> ChatFormat:
    """How a chat's answer is written."""
    return ChatFormat(generation) if generation.asked.calls is None else ToolChatFormat(generation)
