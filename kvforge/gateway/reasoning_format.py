"""What a written format of reasoning consists of; kvforge.gateway.reasoning_formats has one file for each."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from kvforge.gateway.call_events import Reasoning, Text
from kvforge.gateway.marked_text import TOKEN
from kvforge.gateway.written_format import WrittenFormat


class ReasoningReader(Protocol):
    """Tells reasoning and content apart. How the text is cut into pieces changes nothing but how events are cut.
    Content keeps the marks of tokens, by which calls are read."""

    def push(self, text: str, ended: bool) -> list[Reasoning | Text]:
        """What a piece makes certain; with `ended` it is the last one."""


@dataclass(frozen=True)
class ReasoningFormat(WrittenFormat):
    """How a family of models writes what it thinks before it answers.

    Attributes:
        markers: texts that may be special tokens and must be seen all the same.
        begins, ends: the markers around the reasoning; empty where it is in channels.
        reader: makes a reader, of whether the prompt has begun the reasoning, of the markers as the text has them, and
            of whether calls are read from the content, which then has their marks.
    """

    markers: tuple[str, ...]
    reader: Callable[[bool, Callable[[str], str], bool], ReasoningReader]
    begins: str = ""
    ends: str = ""

    def read(self, opened: bool, tokens: Collection[str], calls: bool = False) -> ReasoningReader:
        """A reader of a text in which the markers `tokens` count only as tokens."""
        return self.reader(opened, lambda marker: TOKEN + marker if marker in tokens else marker, calls)


def plain(text: str) -> str:
    """A text whose marks are letters like others."""
    return text.replace(TOKEN, "")
