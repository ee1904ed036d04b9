"""Reasoning that an answer begins with, between two marks."""

from kvforge.gateway.languages.call_events import Reasoning, Text
from kvforge.gateway.languages.marked_text import certain_length
from kvforge.gateway.languages.reasoning_format import plain


class MarkedReasoning:
    """A ReasoningReader. Line breaks around the reasoning and before the content are part of neither. What begins later
    than the answer is content."""

    def __init__(self, begins: str, ends: str, opened: bool) -> None:
        """`begins` and `ends` stand around the reasoning; with `opened` the prompt has begun it."""
        self._begins, self._ends = begins, ends
        self._held = ""
        self._blank: list[str] = []
        """White space before the beginning, which is content where reasoning does not begin."""
        self._num_breaks = 0
        """Line breaks before what is held, which are reasoning where more of it follows."""
        self._step = self._reasoning if opened else self._start
        self._said = False
        """Some of what the step gives out is out already."""

    def push(self, text: str, ended: bool) -> list[Reasoning | Text]:
        self._held += text
        events: list[Reasoning | Text] = []
        step = None
        while step != self._step:
            step = self._step
            events += step(ended)
        return events

    def _start(self, ended: bool) -> list[Reasoning | Text]:
        text = self._held.lstrip()
        self._blank.append(self._held.removesuffix(text))
        self._held = text
        if text.startswith(self._begins):
            self._held, self._step = text.removeprefix(self._begins), self._reasoning
        elif ended or not self._begins.startswith(text):
            self._held = "".join(self._blank) + text
            self._step, self._said = self._content, True
        return []

    def _reasoning(self, ended: bool) -> list[Reasoning | Text]:
        if not self._said:
            self._held = self._held.lstrip("\n")
        certain, found, rest = self._held.partition(self._ends)
        if not found:
            length = len(certain) if ended else certain_length(certain, (self._ends,))
            certain, rest = certain[:length], certain[length:]
        self._held = rest
        is_end = ended and not found
        text = certain if is_end else certain.rstrip("\n")
        breaks, self._num_breaks = self._num_breaks, len(certain) - len(text)
        if text or is_end:
            text = "\n" * breaks + text
        else:
            self._num_breaks += breaks
        self._said |= bool(text)
        if found:
            self._step, self._said = self._content, False
        return [Reasoning(plain(text))] if text else []

    def _content(self, ended: bool) -> list[Reasoning | Text]:
        text, self._held = self._held if self._said else self._held.lstrip("\n"), ""
        self._said |= bool(text)
        return [Text(text)] if text else []
