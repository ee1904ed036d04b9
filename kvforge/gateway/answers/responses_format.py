"""/v1/responses: the answer as a list of items, whole and as the events that build it."""

import secrets
import time
from collections.abc import Iterator
from typing import Any

from kvforge.gateway.answers.generation import Delta, Generation
from kvforge.gateway.answers.one_choice import OneChoice
from kvforge.gateway.answers.response_formats import Parts, dumps
from kvforge.gateway.answers.tool_answers import call_id
from kvforge.gateway.languages.call_events import Arguments, CallBegins, Event, Reasoning


class _TextItem:
    """A message; `text` is the inside of a JSON string."""

    kind, part_kind = "message", "output_text"
    _prefix, _head, _of_part = "msg", b'"role":"assistant"', b'"annotations":[],"logprobs":[],'
    of_delta = b'"logprobs":[],'

    def __init__(self) -> None:
        self.text = bytearray()
        self.id = f"{self._prefix}_{secrets.token_hex(16)}"

    def part(self, text: bytes) -> bytes:
        return b'{"type":"%b",%b"text":"%b"}' % (self.part_kind.encode(), self._of_part, text)

    def written(self, status: str, empty: bool = False) -> bytes:
        """The item as JSON; `empty` as it begins."""
        head = dumps({"id": self.id, "status": status, "type": self.kind})[:-1].encode()
        return b'%b,%b,"content":[%b]}' % (head, self._head, b"" if empty else self.part(bytes(self.text)))


class _ReasoningItem(_TextItem):
    """What comes before the message."""

    kind, part_kind = "reasoning", "reasoning_text"
    _prefix, _head, _of_part = "rs", b'"summary":[]', b""
    of_delta = b""


class _CallItem:
    """A function call; `text` is its arguments as the inside of a JSON string."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = bytearray()
        self.id = f"fc_{secrets.token_hex(16)}"
        self._call_id = call_id()

    def written(self, status: str, empty: bool = False) -> bytes:
        """The item as JSON; `empty` as it begins."""
        call = {"id": self.id, "status": status, "type": "function_call", "call_id": self._call_id, "name": self.name}
        return b'%b,"arguments":"%b"}' % (dumps(call)[:-1].encode(), b"" if empty else bytes(self.text))


_Item = _TextItem | _CallItem


class ResponsesFormat(OneChoice):
    """One answer, always of one choice. Streamed, its text is held to the end: the last event has all of it."""

    def __init__(self, generation: Generation) -> None:
        asked = generation.asked
        super().__init__(asked)
        self._items: list[_Item] = []
        self._sequence_number = 0
        self._head = {
            "id": generation.request_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": generation.asked.model,
            "background": False,
            "error": None,
            "max_tool_calls": None,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "top_logprobs": 0,
            "truncation": "disabled",
            **asked.shown,
        }

    def add(self, delta: Delta) -> None:
        ended = delta.finish_reason is not None
        for event in self._reader.push(delta.text, ended):
            self._take(event)
        if ended:
            self._finish_reason = delta.finish_reason
            if not self._items:
                self._open(_TextItem())
            self._close(self._item_status(len(self._items) - 1))

    def whole(self, usage: dict[str, Any]) -> Parts:
        yield self._response(self._status, usage)

    def opening(self) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", b'"response":%b' % self._response("in_progress", None))

    def closing(self, usage: dict[str, Any]) -> bytes:
        return self._event(f"response.{self._status}", b'"response":%b' % self._response(self._status, usage))

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _item_status(self, index: int) -> str:
        """Only the last item can be incomplete: a text that the limit ended, a call without all its arguments."""
        if index < len(self._items) - 1:
            return "completed"
        if isinstance(self._items[index], _TextItem):
            return self._status
        return "incomplete" if self._reader.is_cut else "completed"

    def _take(self, event: Event) -> None:
        if isinstance(event, CallBegins):
            self._close("completed")
            self._open(_CallItem(event.name))
            return
        if not isinstance(event, Arguments):
            kind = _ReasoningItem if isinstance(event, Reasoning) else _TextItem
            if not self._items or type(self._items[-1]) is not kind:
                self._close("completed")
                self._open(kind())
        item = self._items[-1]
        written = dumps(event.text)[1:-1].encode()
        item.text += written
        self._held += len(written)
        if isinstance(item, _TextItem):
            self._say(f"{item.part_kind}.delta", b'"content_index":0,%b"delta":"%b"' % (item.of_delta, written))
        else:
            self._say("function_call_arguments.delta", b'"delta":"%b"' % written)

    def _open(self, item: _Item) -> None:
        self._items.append(item)
        self._say("output_item.added", b'"item":%b' % item.written("in_progress", empty=True), of_item=False)
        if isinstance(item, _TextItem):
            self._say("content_part.added", b'"content_index":0,"part":%b' % item.part(b""))

    def _close(self, status: str) -> None:
        """The end of the latest item."""
        if not self._items or not self._streamed:
            return
        item = self._items[-1]
        text = bytes(item.text)
        if isinstance(item, _TextItem):
            self._say(f"{item.part_kind}.done", b'"content_index":0,%b"text":"%b"' % (item.of_delta, text))
            self._say("content_part.done", b'"content_index":0,"part":%b' % item.part(text))
        else:
            name = dumps(item.name).encode()
            self._say("function_call_arguments.done", b'"name":%b,"arguments":"%b"' % (name, text))
        self._say("output_item.done", b'"item":%b' % item.written(status), of_item=False)

    def _say(self, kind: str, content: bytes, of_item: bool = True) -> None:
        if self._streamed:
            place = f'"output_index":{len(self._items) - 1},'
            if of_item:
                place += f'"item_id":{dumps(self._items[-1].id)},'
            self._pending += self._event(f"response.{kind}", place.encode() + content)

    def _event(self, kind: str, content: bytes) -> bytes:
        head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._sequence_number},'
        self._sequence_number += 1
        return head.encode() + content + b"}\n\n"

    def _response(self, status: str, usage: dict[str, Any] | None) -> bytes:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        head = {**self._head, "status": status, "incomplete_details": details, "usage": usage and _usage(usage)}
        items = [] if usage is None else self._items
        output = [item.written(self._item_status(index)) for index, item in enumerate(items)]
        return b'%b,"output":[%b]}' % (dumps(head)[:-1].encode(), b",".join(output))


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
