"""The JSON of answers, whole and in pieces, for both endpoints: written as tokens come, held as bytes."""

import json
import time
from collections.abc import Iterator
from typing import Any, Protocol

from kvforge.gateway.answers.generation import Delta, Generation
from kvforge.gateway.answers.logprobs import ChatLogprobs, CompletionLogprobs, Logprobs, PromptLogprobs

Parts = Iterator[bytes | bytearray]


class ResponseFormat(Protocol):
    """How an endpoint writes its answer; one object per answer."""

    def add(self, delta: Delta) -> None:
        """Take in what is new."""

    @property
    def num_bytes(self) -> int:
        """Held at the moment, of all choices."""

    def missing(self) -> bool:
        """Whether a choice has not ended."""

    def whole(self, usage: dict[str, Any]) -> Parts:
        """The body of an answer that is not streamed."""

    def opening(self) -> Iterator[bytes]:
        """Events sent before the first token."""

    def event(self, index: int) -> bytes:
        """What a choice has to say since its last event; empty when that is nothing yet."""

    def closing(self, usage: dict[str, Any]) -> bytes:
        """The events that end a stream."""


class Choice:
    """What is known of a choice and not sent: its text as the inside of a JSON string, its log-probabilities, and those
    of its prompt where they are apart."""

    def __init__(self, logprobs: Logprobs | None, prompt: PromptLogprobs | None) -> None:
        self.text = bytearray()
        self.logprobs = logprobs
        self.prompt = prompt
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self.logprob = 0.0
        self.stop_reason: Any = None

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(self.num_tokens, 1)

    @property
    def num_bytes(self) -> int:
        return len(self.text) + sum(held.num_bytes for held in (self.logprobs, self.prompt) if held is not None)

    def take_text(self) -> bytes:
        text, self.text = self.text, bytearray()
        return bytes(text)

    def take_logprobs(self) -> Parts:
        return iter((b"null",)) if self.logprobs is None else self.logprobs.take()

    def take_prompt(self) -> Parts:
        """The member that says its prompt's log-probabilities; nothing where they are not apart."""
        if self.prompt is not None:
            yield b',"prompt_logprobs":'
            yield from self.prompt.take()

    def end(self) -> bytes:
        """The fields that say why it ended."""
        reasons = f'"finish_reason":{dumps(self.finish_reason)},"stop_reason":{dumps(plain_stop(self.stop_reason))}'
        return reasons.encode()


class _Format:
    kind = ""
    chunk_kind = ""

    def __init__(self, generation: Generation) -> None:
        model = generation.model
        self._asked = generation.asked
        self._bytes = model.token_bytes
        self._num_choices = generation.num_choices
        self._choices: dict[int, Choice] = {}
        self.num_bytes = 0
        head = {
            "id": generation.request_id,
            "object": self.kind,
            "created": int(time.time()),
            "model": self._asked.model,
            "system_fingerprint": f"kvforge-{model.manifest.checkpoint_sha256[:12]}",
        }
        self._head = head
        self._chunk_head = {**head, "object": self.chunk_kind}
        # Every event is `_before`, the choice's own part, `_after`: the rest is the same all the time.
        self._before = f'data: {dumps(self._chunk_head)[:-1]},"choices":[{{'
        self._after = '}],"usage":null}\n\n' if self._asked.include_usage else "}]}\n\n"
        self._usage = generation.usage if self._asked.continuous_usage else None

    def add(self, delta: Delta) -> None:
        choice = self._choices.get(delta.index)
        if choice is None:
            shown = self._asked.logprobs is not None and not self._asked.silent
            logprobs = self._new_logprobs(delta.index) if shown else None
            prompt = PromptLogprobs(self._bytes) if self._says_of_prompt(delta.index) else None
            choice = self._choices[delta.index] = Choice(logprobs, prompt)
        before = choice.num_bytes
        choice.text += dumps(delta.text)[1:-1].encode()
        if self._asked.kept and delta.logprobs is not None:
            choice.num_tokens += len(delta.logprobs)
            choice.logprob += sum(entry.logprob for entry in delta.logprobs)
        of_prompt = choice.logprobs if self._asked.echoes_logprobs else choice.prompt
        if delta.prompt is not None and of_prompt is not None:
            of_prompt.add(delta.prompt)
        if choice.logprobs is not None and delta.logprobs is not None:
            choice.logprobs.add(delta.logprobs)
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        self.num_bytes += choice.num_bytes - before

    def missing(self) -> bool:
        ended = sum(choice.finish_reason is not None for choice in self._choices.values())
        return ended < self._num_choices

    def whole(self, usage: dict[str, Any]) -> Parts:
        yield f'{dumps(self._head)[:-1]},"choices":['.encode()
        for position, index in enumerate(self._returned()):
            choice = self._choices[index]
            yield f'{"," if position else ""}{{"index":{position},'.encode()
            yield from self._content(index, choice.take_text())
            yield b',"logprobs":'
            yield from choice.take_logprobs()
            yield from self._of_prompt(choice)
            yield b"," + choice.end() + b"}"
        yield b"]"
        yield from self._of_first_prompt()
        yield f',"usage":{dumps(usage)}}}'.encode()

    def _says_of_prompt(self, index: int) -> bool:
        """Whether log-probabilities of its prompt, apart from others, are returned that come with a choice."""
        return self._asked.prompt_logprobs is not None and not self._asked.echoes_logprobs

    def _of_prompt(self, choice: Choice) -> Parts:
        """What a choice says of its prompt."""
        return iter(())

    def _of_first_prompt(self) -> Parts:
        """What the answer says of it beside its choices."""
        return iter(())

    def _returned(self) -> list[int]:
        """The choices to return: all, or of each prompt those with the highest mean log-probability."""
        indices = list(range(self._num_choices))
        if not self._asked.kept:
            return indices
        groups = (indices[at : at + self._asked.n] for at in range(0, self._num_choices, self._asked.n))
        return [
            index
            for group in groups
            for index in sorted(group, key=lambda index: -self._choices[index].mean_logprob)[: self._asked.kept]
        ]

    def opening(self) -> Iterator[bytes]:
        return iter(())

    def event(self, index: int) -> bytes:
        choice = self._choices[index]
        before = choice.num_bytes
        event = self._of(index, choice, before > 0)
        self.num_bytes -= before - choice.num_bytes
        return event

    def closing(self, usage: dict[str, Any]) -> bytes:
        last = f"data: {dumps({**self._chunk_head, 'choices': [], 'usage': usage})}\n\n"
        return (last if self._asked.include_usage else "").encode() + b"data: [DONE]\n\n"

    def _of(self, index: int, choice: Choice, grew: bool) -> bytes:
        raise NotImplementedError

    def _content(self, index: int, text: bytes) -> Parts:
        raise NotImplementedError

    def _new_logprobs(self, index: int) -> Logprobs:
        raise NotImplementedError

    def _event(self, index: int, content: bytes, logprobs: Parts, end: bytes | None) -> bytes:
        before = f'{self._before}"index":{index},'.encode()
        reason = b'"finish_reason":null' if end is None else end
        after = self._after if self._usage is None else f'}}],"usage":{dumps(self._usage.body)}}}\n\n'
        return b"".join((before, content, b',"logprobs":', *logprobs, b",", reason, after.encode()))


class CompletionFormat(_Format):
    """/v1/completions."""

    kind = chunk_kind = "text_completion"

    def opening(self) -> Iterator[bytes]:
        if self._asked.echoes:
            for index in range(self._num_choices):
                yield self._event(index, b'"text":"%b"' % self._echo(index), iter((b"null",)), None)

    def _of(self, index: int, choice: Choice, grew: bool) -> bytes:
        end = choice.end() if choice.finish_reason is not None else None
        if not grew and end is None:
            return b""
        logprobs = choice.take_logprobs() if choice.logprobs is not None and choice.logprobs.num_bytes else (b"null",)
        return self._event(index, b'"text":"%b"' % choice.take_text(), iter(logprobs), end)

    def _content(self, index: int, text: bytes) -> Parts:
        yield from (b'"text":"', self._echo(index), text, b'"')

    def _new_logprobs(self, index: int) -> Logprobs:
        echoed = self._echo(index) if self._asked.echoes_logprobs else b""
        logprobs = CompletionLogprobs(self._bytes, json.loads(b'"%b"' % echoed))
        if self._asked.echoes_logprobs:
            logprobs.add_first(memoryview(self._asked.prompts[index // self._asked.n]).cast("i")[0])
        return logprobs

    def _of_prompt(self, choice: Choice) -> Parts:
        return choice.take_prompt()

    def _echo(self, index: int) -> bytes:
        return self._asked.echoes[index // self._asked.n] if self._asked.echoes else b""


class ChatFormat(_Format):
    """/v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def opening(self) -> Iterator[bytes]:
        for index in range(self._num_choices):
            content = b'"delta":{"role":"assistant","content":%b}' % self._opening_content()
            yield self._event(index, content, iter((b"null",)), None)

    def _of(self, index: int, choice: Choice, grew: bool) -> bytes:
        events = b""
        changes = self._changes(index, choice)
        for change in changes or ([b'"content":""'] if choice.num_bytes else []):
            held = choice.logprobs is not None and choice.logprobs.num_bytes
            events += self._event(
                index, b'"delta":{%b}' % change, choice.take_logprobs() if held else iter((b"null",)), None
            )
        if choice.finish_reason is not None:
            events += self._event(index, b'"delta":{}', iter((b"null",)), choice.end())
        return events

    def _opening_content(self) -> bytes:
        return b'""'

    def _changes(self, index: int, choice: Choice) -> list[bytes]:
        """What deltas say that is new, one event each."""
        return [b'"content":"%b"' % choice.take_text()] if choice.text else []

    def _content(self, index: int, text: bytes) -> Parts:
        yield from (b'"message":{"role":"assistant","content":"', text, b'","refusal":null}')

    def _new_logprobs(self, index: int) -> Logprobs:
        return ChatLogprobs(self._bytes)

    def _says_of_prompt(self, index: int) -> bool:
        return index == 0 and super()._says_of_prompt(index)

    def _of_first_prompt(self) -> Parts:
        return self._choices[0].take_prompt()


def plain_stop(reason: Any) -> Any:
    """A stop reason as clients know it: the stop string or the stop token's id."""
    return reason[0] if isinstance(reason, list) and len(reason) == 1 else reason


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
