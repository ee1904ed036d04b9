"""The JSON of answers, whole and in pieces, for both endpoints."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvforge.gateway.generation import Delta, Generation
from kvforge.gateway.logprobs import CompletionLogprobs, chat_logprobs
from kvforge.gateway.model import ServedModel
from kvforge.runtime.outputs import TokenLogprobs


@dataclass
class Choice:
    """A choice's parts, collected."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.logprobs += delta.logprobs or ()
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class AnswerFormat(Protocol):
    """How an endpoint writes its answer; one object per answer."""

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def opening(self) -> list[bytes]:
        """Events sent before the first token."""

    def event(self, delta: Delta) -> bytes:
        """The event of a delta; empty when it says nothing yet."""

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The event without choices that ends a stream with `include_usage`."""


class _Format:
    kind = ""
    chunk_kind = ""

    def __init__(self, generation: Generation, usage: bool) -> None:
        model: ServedModel = generation.model
        self._bytes = model.token_bytes
        self._num_choices = generation.num_choices
        self._with_logprobs = generation.params.logprobs is not None
        self._head = {
            "id": generation.request_id,
            "object": self.kind,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": f"kvforge-{model.manifest.checkpoint_sha256[:12]}",
        }
        self._chunk_head = {**self._head, "object": self.chunk_kind}
        # Every event is `_before`, the choice's own part, `_after`: the rest is the same all the time.
        self._before = f'data: {_dumps(self._chunk_head)[:-1]},"choices":[{{'
        self._after = '}],"usage":null}\n\n' if usage else "}]}\n\n"

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return f"data: {_dumps({**self._chunk_head, 'choices': [], 'usage': usage})}\n\n".encode()

    def _event(self, index: int, content: str, logprobs: Any, delta: Delta | None) -> bytes:
        reason = "null"
        if delta is not None and delta.finish_reason is not None:
            reason = f'"{delta.finish_reason}","stop_reason":{_dumps(plain_stop(delta.stop_reason))}'
        written = "null" if logprobs is None else _dumps(logprobs)
        return (
            f'{self._before}"index":{index},{content},"logprobs":{written},"finish_reason":{reason}{self._after}'
        ).encode()

    def _body(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": choices, "usage": usage}


class CompletionFormat(_Format):
    """/v1/completions; `echoes` are the prompts' texts where they are to be repeated."""

    kind = chunk_kind = "text_completion"

    def __init__(self, generation: Generation, usage: bool, echoes: Sequence[str] = ()) -> None:
        super().__init__(generation, usage)
        n = generation.params.n
        self._echoes = [echoes[index // n] if echoes else "" for index in range(self._num_choices)]
        self._logprobs = [CompletionLogprobs(self._bytes) for _ in range(self._num_choices)]

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        return self._body(
            [
                {
                    "index": index,
                    "text": self._echoes[index] + "".join(choice.texts),
                    "logprobs": self._logprobs[index].add(choice.logprobs) if self._with_logprobs else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": plain_stop(choice.stop_reason),
                }
                for index, choice in enumerate(choices)
            ],
            usage,
        )

    def opening(self) -> list[bytes]:
        return [self._event(i, f'"text":{_dumps(echo)}', None, None) for i, echo in enumerate(self._echoes) if echo]

    def event(self, delta: Delta) -> bytes:
        logprobs = self._logprobs[delta.index].add(delta.logprobs) if delta.logprobs else None
        if not delta.text and logprobs is None and delta.finish_reason is None:
            return b""
        return self._event(delta.index, f'"text":{_dumps(delta.text)}', logprobs, delta)


class ChatFormat(_Format):
    """/v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        return self._body(
            [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
                    "logprobs": chat_logprobs(choice.logprobs, self._bytes) if self._with_logprobs else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": plain_stop(choice.stop_reason),
                }
                for index, choice in enumerate(choices)
            ],
            usage,
        )

    def opening(self) -> list[bytes]:
        role = '"delta":{"role":"assistant","content":""}'
        return [self._event(index, role, None, None) for index in range(self._num_choices)]

    def event(self, delta: Delta) -> bytes:
        logprobs = chat_logprobs(delta.logprobs, self._bytes) if delta.logprobs else None
        events = b""
        if delta.text or logprobs is not None:
            events = self._event(delta.index, f'"delta":{{"content":{_dumps(delta.text)}}}', logprobs, None)
        if delta.finish_reason is not None:
            events += self._event(delta.index, '"delta":{}', None, delta)
        return events


def plain_stop(reason: Any) -> Any:
    """A stop reason as clients know it: the stop string or the stop token's id."""
    return reason[0] if isinstance(reason, list) and len(reason) == 1 else reason


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
