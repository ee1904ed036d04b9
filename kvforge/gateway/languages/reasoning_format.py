"""What a written format of reasoning consists of; kvforge.gateway.languages.reasoning_formats has one file for each."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from kvforge.gateway.languages.call_events import Reasoning, Text
from kvforge.gateway.languages.marked_text import TOKEN
from kvforge.gateway.languages.written_format import TokenOf, WrittenFormat, spelled
from kvforge.runtime.requests.reasoning import ReasoningForm


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
        around: what stands before and behind it in the answer's text, where that is more than these markers.
        content: what then begins the content.
        repeats: there may be more of it.
        breaks: the maximum of line breaks that a guide allows behind it.
        reader: makes a reader, of whether the prompt has begun the reasoning, of the markers as the text has them, and
            of whether calls are read from the content, which then has their marks.
    """

    markers: tuple[str, ...]
    reader: Callable[[bool, Callable[[str], str], bool], ReasoningReader]
    begins: str = ""
    ends: str = ""
    around: tuple[str, str] | None = None
    content: str = ""
    repeats: bool = False
    breaks: int = 0

    def before(
        self, content: str, begun: bool, budget: int | None, markers: Collection[str], token_of: TokenOf
    ) -> ReasoningForm:
        """The reasoning before a guided text, as the guide has it. ``content`` begins the text, ``begun`` says whether
        the prompt has begun the reasoning, and ``markers`` are those in both."""
        opens, closes, then = (tuple(spelled(text, markers, token_of)) for text in (*self._around, content))
        return ReasoningForm(opens, closes, begun, self.repeats and budget is None, budget, self.breaks, then)

    def ends_with_token(self, token_of: TokenOf) -> bool:
        """Whether a token ends the reasoning, so that its length can be bounded."""
        return isinstance(spelled(self._around[1], self.markers, token_of)[0], int)

    @property
    def _around(self) -> tuple[str, str]:
        return (self.begins, self.ends) if self.around is None else self.around

    def read(self, opened: bool, tokens: Collection[str], calls: bool = False) -> ReasoningReader:
        """A reader of a text in which the markers `tokens` count only as tokens."""
        return self.reader(opened, lambda marker: TOKEN + marker if marker in tokens else marker, calls)


def plain(text: str) -> str:
    """A text whose marks are letters like others."""
    return text.replace(TOKEN, "")
