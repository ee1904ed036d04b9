"""/v1/messages: the answer as a message of blocks, whole and as the events that build it."""

import json
from collections.abc import Iterator
from typing import Any

from kvforge.gateway.answers.generation import Delta, Generation
from kvforge.gateway.answers.one_choice import OneChoice
from kvforge.gateway.answers.response_formats import Parts, dumps, plain_stop
from kvforge.gateway.answers.tool_answers import call_id
from kvforge.gateway.languages.call_events import Arguments, CallBegins, Event, Reasoning
from kvforge.gateway.requests.messages.fields import OMITTED
from kvforge.tokenization.cut_json import cut_object

SIGNATURE = "kvforge"
"""Of every block of thinking: clients want one and send it back; nothing is signed."""
CALL_ID = "toolu_"


class _Text:
    """A block of text. `text` is, here and in the other blocks, what was held of it, as JSON has it."""

    kind, member, delta = "text", b"text", b"text_delta"

    def __init__(self) -> None:
        self.text = bytearray()

    def begun(self) -> bytes:
        """As it begins."""
        return b'{"type":"text","text":""}'

    def piece(self, text: str) -> bytes:
        """More of it, as a delta and as the whole block have it."""
        return dumps(text)[1:-1].encode()

    def whole(self, is_cut: bool) -> bytes:
        return b'{"type":"text","text":"%b"}' % bytes(self.text)


class _Thinking(_Text):
    """What comes before the text; with `is_omitted` it is there and empty."""

    kind, member, delta = "thinking", b"thinking", b"thinking_delta"

    def __init__(self, is_omitted: bool) -> None:
        super().__init__()
        self._is_omitted = is_omitted

    def begun(self) -> bytes:
        return b'{"type":"thinking","thinking":"","signature":""}'

    def piece(self, text: str) -> bytes:
        return b"" if self._is_omitted else super().piece(text)

    def whole(self, is_cut: bool) -> bytes:
        return b'{"type":"thinking","thinking":"%b","signature":%b}' % (bytes(self.text), dumps(SIGNATURE).encode())


class _Call(_Text):
    """A call of a tool; its text is the JSON of the arguments itself."""

    kind, member, delta = "tool_use", b"partial_json", b"input_json_delta"

    def __init__(self, name: str) -> None:
        super().__init__()
        self._head = dumps({"type": "tool_use", "id": call_id(CALL_ID), "name": name})[:-1].encode()

    def begun(self) -> bytes:
        return b'%b,"input":{}}' % self._head

    def whole(self, is_cut: bool) -> bytes:
        """Of a call that was cut off its input has what is there."""
        arguments = json.loads(b'"%b"' % bytes(self.text))
        if is_cut or not arguments:
            arguments = dumps(cut_object(arguments) or {})
        return b'%b,"input":%b}' % (self._head, arguments.encode())


class MessagesFormat(OneChoice):
    """One answer, always of one choice. Streamed, nothing is held that has been sent."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        asked = generation.asked
        super().__init__(asked)
        self._is_omitted = bool(asked.shown.get(OMITTED))
        self._blocks: list[_Text] = []
        self._stop: Any = None
        self._head = {"id": generation.request_id, "type": "message", "role": "assistant",
                      "model": asked.model}  # fmt: skip

    def add(self, delta: Delta) -> None:
        ended = delta.finish_reason is not None
        for event in self._reader.push(delta.text, ended):
            self._take(event)
        if ended:
            self._finish_reason, self._stop = delta.finish_reason, plain_stop(delta.stop_reason)
            self._close()

    def whole(self, usage: dict[str, Any]) -> Parts:
        yield b'%b,"content":[' % dumps(self._head)[:-1].encode()
        for index, block in enumerate(self._blocks):
            is_last = index == len(self._blocks) - 1
            yield (b"," if index else b"") + block.whole(is_last and self._reader.is_cut)
        yield b"],%b}" % dumps({**self._end, "usage": _usage(usage)})[1:-1].encode()

    def opening(self) -> Iterator[bytes]:
        # How many tokens the prefix cache spared is known at the end, with which the client replaces this.
        usage = {"input_tokens": self._generation.usage.prompt, "output_tokens": 0}
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", b'"message":%b' % dumps({**self._head, **nothing, "usage": usage}).encode())
        yield _event("ping")

    def closing(self, usage: dict[str, Any]) -> bytes:
        end = b'"delta":%b,"usage":%b' % (dumps(self._end).encode(), dumps(_usage(usage)).encode())
        return _event("message_delta", end) + _event("message_stop")

    @property
    def _end(self) -> dict[str, Any]:
        """Why the message ends."""
        usage, is_stop = self._generation.usage, isinstance(self._stop, str)
        if self._finish_reason == "length":
            is_full = usage.prompt + usage.completion >= self._generation.model.max_seq_len
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif any(isinstance(block, _Call) for block in self._blocks) and not self._reader.is_cut:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if is_stop else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self._stop if reason == "stop_sequence" else None}

    def _take(self, event: Event) -> None:
        if isinstance(event, CallBegins):
            self._open(_Call(event.name))
            return
        if not event.text:
            return
        if not isinstance(event, Arguments):
            kind = _Thinking if isinstance(event, Reasoning) else _Text
            if not self._blocks or type(self._blocks[-1]) is not kind:
                self._open(_Thinking(self._is_omitted) if kind is _Thinking else _Text())
        block = self._blocks[-1]
        piece = block.piece(event.text)
        if not self._streamed:
            block.text += piece
            self._held += len(piece)
        elif piece:
            self._say("content_block_delta", b'"delta":{"type":"%b","%b":"%b"}' % (block.delta, block.member, piece))

    def _open(self, block: _Text) -> None:
        self._close()
        self._blocks.append(block)
        self._say("content_block_start", b'"content_block":%b' % block.begun())

    def _close(self) -> None:
        """The end of the latest block."""
        if not self._blocks:
            return
        if isinstance(self._blocks[-1], _Thinking):
            signature = dumps(SIGNATURE).encode()
            self._say("content_block_delta", b'"delta":{"type":"signature_delta","signature":%b}' % signature)
        self._say("content_block_stop")

    def _say(self, kind: str, content: bytes = b"") -> None:
        """An event of the latest block."""
        if self._streamed:
            place = b'"index":%d' % (len(self._blocks) - 1)
            self._pending += _event(kind, place + b"," + content if content else place)


def _event(kind: str, content: bytes = b"") -> bytes:
    head = f'event: {kind}\ndata: {{"type":"{kind}"'.encode()
    return head + (b"," + content if content else b"") + b"}\n\n"


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's input_tokens are those that were computed; what the prefix cache spared stands beside them."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens")
    found = {
        "input_tokens": usage["prompt_tokens"] - (cached or 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
    if "completion_tokens_details" in usage:
        found["output_tokens_details"] = {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]}
    return found
