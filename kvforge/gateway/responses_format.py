"""/v1/responses: the answer as a list of items, whole and as the events that build it."""

import secrets
import time
from collections.abc import Iterator
from typing import Any

from kvforge.gateway.call_events import Arguments, CallBegins, Event, Text
from kvforge.gateway.generation import Delta, Generation
from kvforge.gateway.response_formats import Parts, dumps
from kvforge.gateway.tool_answers import CallCollector, call_id


class _Item:
    """A message or a function call; `text` is the message's text or the call's arguments, as the inside of a JSON
    string."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.text = bytearray()
        kind = "msg" if name is None else "fc"
        self.id = f"{kind}_{secrets.token_hex(16)}"
        self.call_id = None if name is None else call_id()

    def part(self, text: bytes) -> bytes:
        return b'{"type":"output_text","annotations":[],"logprobs":[],"text":"%b"}' % text

    def written(self, status: str, empty: bool = False) -> bytes:
        """The item as JSON; `empty` as it begins."""
        head = {"id": self.id, "status": status}
        if self.name is None:
            content = b"" if empty else self.part(bytes(self.text))
            return b'%b,"type":"message","role":"assistant","content":[%b]}' % (dumps(head)[:-1].encode(), content)
        call = {**head, "type": "function_call", "call_id": self.call_id, "name": self.name}
        return b'%b,"arguments":"%b"}' % (dumps(call)[:-1].encode(), b"" if empty else bytes(self.text))


class ResponsesFormat:
    """One answer, always of one choice. Streamed, its text is held to the end: the last event has all of it."""

    def __init__(self, generation: Generation) -> None:
        asked = generation.asked
        self._collector = None if asked.calls is None else CallCollector(asked.calls)
        self._streamed = asked.stream
        self._items: list[_Item] = []
        self._pending = bytearray()
        self._held = 0
        self._sequence_number = 0
        self._finish_reason: str | None = None
        self._head = {
            "id": generation.request_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": generation.model.name,
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
        if self._collector is not None:
            events = self._collector.push(delta.text, ended)
        else:
            events = [Text(delta.text)] if delta.text else []
        for event in events:
            self._take(event)
        if ended:
            self._finish_reason = delta.finish_reason
            if not self._items:
                self._open(None)
            self._close(self._item_status(len(self._items) - 1))

    @property
    def num_bytes(self) -> int:
        return len(self._pending) if self._streamed else self._held

    def missing(self) -> bool:
        return self._finish_reason is None

    def whole(self, usage: dict[str, Any]) -> Parts:
        yield self._response(self._status, usage)

    def opening(self) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", b'"response":%b' % self._response("in_progress", None))

    def event(self, index: int) -> bytes:
        pending, self._pending = self._pending, bytearray()
        return bytes(pending)

    def closing(self, usage: dict[str, Any]) -> bytes:
        return self._event(f"response.{self._status}", b'"response":%b' % self._response(self._status, usage))

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _item_status(self, index: int) -> str:
        """Only the last item can be incomplete: a message that the limit ended, a call without all its arguments."""
        if index < len(self._items) - 1:
            return "completed"
        if self._items[index].name is None:
            return self._status
        return "incomplete" if self._collector is not None and self._collector.is_cut else "completed"

    def _take(self, event: Event) -> None:
        if isinstance(event, CallBegins):
            self._close("completed")
            self._open(event.name)
            return
        if isinstance(event, Text) and (not self._items or self._items[-1].name is not None):
            self._close("completed")
            self._open(None)
        item = self._items[-1]
        written = dumps(event.text)[1:-1].encode()
        item.text += written
        self._held += len(written)
        if isinstance(event, Arguments):
            self._say("function_call_arguments.delta", b'"delta":"%b"' % written)
        else:
            self._say("output_text.delta", b'"content_index":0,"logprobs":[],"delta":"%b"' % written)

    def _open(self, name: str | None) -> None:
        item = _Item(name)
        self._items.append(item)
        self._say("output_item.added", b'"item":%b' % item.written("in_progress", empty=True), of_item=False)
        if name is None:
            self._say("content_part.added", b'"content_index":0,"part":%b' % item.part(b""))

    def _close(self, status: str) -> None:
        """The end of the latest item."""
        if not self._items or not self._streamed:
            return
        item = self._items[-1]
        text = bytes(item.text)
        if item.name is None:
            self._say("output_text.done", b'"content_index":0,"logprobs":[],"text":"%b"' % text)
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
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
