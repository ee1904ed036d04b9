"""gpt-oss: messages in channels, of which analysis is the reasoning and all others are content."""

import re
from collections.abc import Callable

from kvforge.gateway.languages.call_events import Reasoning, Text
from kvforge.gateway.languages.marked_text import certain_length
from kvforge.gateway.languages.reasoning_format import ReasoningFormat, plain

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CALL = "<|call|>"
_ENDS = ("<|end|>", "<|return|>", _CALL)
_MARKERS = (_START, _CHANNEL, _MESSAGE, *_ENDS, "<|constrain|>")


_RECIPIENT = re.compile(r"to=(functions\.[A-Za-z0-9_.-]+)")
_ADDRESSED = " to=functions."
"""What the first message may begin with, since the prompt has named its author."""


class _ChannelReader:
    """The prompt has named the first message's author. A text without channels is content. Messages of one kind are
    lines of it. Where calls are read, a message to a function is content, too, as tool_formats/harmony.py
    has it: marks around the function's name, whatever stands beside it in the message's head."""

    def __init__(self, opened: bool, marker: Callable[[str], str], calls: bool) -> None:
        self._marks = {marker(text): text for text in _MARKERS}
        self._mark = re.compile("|".join(map(re.escape, self._marks)))
        self._opens, self._called, self._closes = marker(_START), marker(_MESSAGE), marker(_CALL)
        self._calls = calls
        self._held = ""
        self._begun = False
        """Something of the first message is known."""
        self._kind: type[Reasoning] | type[Text] | None = Text
        """What the text is; None between messages."""
        self._head = ""
        """What stands before a message's text, where the text is there."""
        self._channel: str | None = None
        """The part of the head that begins with the channel."""
        self._in_call = False
        self._ended: dict[type[Reasoning] | type[Text], bool] = {}
        """The kinds of which something is out, and whether a message has ended since."""

    def push(self, text: str, ended: bool) -> list[Reasoning | Text]:
        self._held += text
        if not self._begun and self._held:
            if not ended and _ADDRESSED.startswith(self._held):
                return []
            self._begun = True
            self._kind = None if self._held.startswith(_ADDRESSED) else Text
        events: list[Reasoning | Text] = []
        while found := self._mark.search(self._held):
            events += self._say(self._held[: found.start()])
            self._held = self._held[found.end() :]
            events += self._turn(self._marks[found[0]])
        length = len(self._held) if ended else certain_length(self._held, self._marks)
        certain, self._held = self._held[:length], self._held[length:]
        return events + self._say(certain)

    def _turn(self, mark: str) -> list[Reasoning | Text]:
        self._head += " "  # a mark ends a name
        if mark == _CHANNEL:
            self._kind, self._channel = None, ""
        elif mark == _MESSAGE:
            is_analysis = self._channel is not None and self._channel.split()[:1] == ["analysis"]
            self._kind, self._channel = Reasoning if is_analysis else Text, None
            recipient, self._head = _RECIPIENT.search(self._head), ""
            self._in_call = self._calls and recipient is not None
            if self._in_call and recipient is not None:
                return [Text(self._opens + recipient[1] + self._called)]
        elif mark == _START or mark in _ENDS:
            was_call, self._in_call = self._in_call, False
            self._kind, self._channel, self._head = None, None, ""
            if was_call:
                return [Text(self._closes)]
            self._ended = dict.fromkeys(self._ended, True)
        return []

    def _say(self, text: str) -> list[Reasoning | Text]:
        if self._in_call:
            return [Text(text)] if text else []
        if self._channel is not None:
            self._channel += text
        if self._kind is None or not text:
            self._head += text
            return []
        before = "\n" if self._ended.get(self._kind) else ""
        self._ended[self._kind] = False
        return [Reasoning(before + plain(text)) if self._kind is Reasoning else Text(before + text)]


FORMAT = ReasoningFormat(
    name="harmony",
    signs=(_CHANNEL, _MESSAGE),
    foreign=(),
    markers=_MARKERS,
    reader=_ChannelReader,
    around=(f"{_CHANNEL}analysis{_MESSAGE}", f"<|end|>{_START}assistant"),
    content=f"{_CHANNEL}final{_MESSAGE}",
    repeats=True,
)
