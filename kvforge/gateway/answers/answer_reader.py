"""What a growing answer says: its reasoning, its content and its tool calls."""

from kvforge.gateway.languages.asked_forms import Calls
from kvforge.gateway.languages.call_events import CallBegins, Event, Reasoning, Text
from kvforge.gateway.languages.call_reader import with_token_marks
from kvforge.gateway.languages.reasoning_format import plain
from kvforge.gateway.languages.reasoning_formats import reasoning_formats
from kvforge.gateway.languages.tool_formats import formats
from kvforge.gateway.parsed_request import ParsedRequest


class AnswerReader:
    """Reasoning is read first; calls are in what follows it."""

    def __init__(self, asked: ParsedRequest) -> None:
        thinking = asked.thinking
        form = None if thinking is None else reasoning_formats()[thinking.format]
        calls = asked.calls
        self._reasoning = None
        if form is not None and thinking is not None:
            self._reasoning = form.read(thinking.opened, thinking.tokens, calls is not None)
        self._calls = None if calls is None else _CallCollector(calls)
        if calls is not None and calls.prefix:
            self.push(with_token_marks(calls.prefix, calls.tokens), False)

    @property
    def is_cut(self) -> bool:
        """The last call that counts lacks some of its arguments."""
        return self._calls is not None and self._calls.is_cut

    def push(self, text: str, ended: bool) -> list[Event]:
        """The events of a piece, which may be the last one."""
        if self._reasoning is None:
            return self._content(text, ended)
        events: list[Event] = []
        content = ""
        for event in self._reasoning.push(text, ended):
            if isinstance(event, Reasoning):
                events.append(event)
            else:
                content += event.text
        return events + self._content(content, ended)

    def _content(self, text: str, ended: bool) -> list[Event]:
        if self._calls is not None:
            return self._calls.push(text, ended)
        return [Text(plain(text))] if text else []


class _CallCollector:
    """Tells content and calls apart."""

    def __init__(self, asked: Calls) -> None:
        self._reader = formats()[asked.format].reader(asked)
        self._parallel = asked.parallel
        self._num_calls = 0
        self._unsaid = asked.prefix
        """What the prompt says of the answer already, which is no content where no call follows."""

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
