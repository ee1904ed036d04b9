"""gpt-oss: messages in channels, of which analysis is the reasoning and all others are content."""

import re
from collections.abc import Callable

from kvforge.gateway.call_events import Reasoning, Text
from kvforge.gateway.marked_text import certain_length
from kvforge.gateway.reasoning_format import ReasoningFormat, plain

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKERS = (_START, _CHANNEL, _MESSAGE, *_ENDS, "<|constrain|>")


class _ChannelReader:
    """The prompt has named the first message's author. A text without channels is content. Messages of one kind are
    lines of it."""

    def __init__(self, opened: bool, marker: Callable[[str], str]) -> None:
        self._marks = {marker(text): text for text in _MARKERS}
        self._mark = re.compile("|".join(map(re.escape, self._marks)))
        self._held = ""
        self._kind: type[Reasoning] | type[Text] | None = Text
        """What the text is; None between messages."""
        self._channel: str | None = None
        """The head of a message so far, where the text is in one."""
        self._ended: dict[type[Reasoning] | type[Text], bool] = {}
        """The kinds of which something is out, and whether a message has ended since."""

    def push(self, text: str, ended: bool) -> list[Reasoning | Text]:
        self._held += text
        events: list[Reasoning | Text] = []
        while found := self._mark.search(self._held):
            events += self._say(self._held[: found.start()])
            self._held = self._held[found.end() :]
            self._turn(self._marks[found[0]])
        length = len(self._held) if ended else certain_length(self._held, self._marks)
        certain, self._held = self._held[:length], self._held[length:]
        return events + self._say(certain)

    def _turn(self, mark: str) -> None:
        if mark == _CHANNEL:
            self._kind, self._channel = None, ""
        elif mark == _MESSAGE:
            is_analysis = self._channel is not None and self._channel.split()[:1] == ["analysis"]
            self._kind, self._channel = Reasoning if is_analysis else Text, None
        elif mark == _START or mark in _ENDS:
            self._kind, self._channel = None, None
            self._ended = dict.fromkeys(self._ended, True)

    def _say(self, text: str) -> list[Reasoning | Text]:
        if self._channel is not None:
            self._channel += text
        if self._kind is None or not text:
            return []
        before = "\n" if self._ended.get(self._kind) else ""
        self._ended[self._kind] = False
        return [Reasoning(before + plain(text)) if self._kind is Reasoning else Text(before + text)]


FORMAT = ReasoningFormat(
    name="harmony", signs=(_CHANNEL, _MESSAGE), foreign=(), markers=_MARKERS, reader=_ChannelReader
)
