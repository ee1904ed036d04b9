"""From an answer's text to its content and its tool calls, while it grows."""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvforge.gateway.languages.call_events import Arguments, Event, Text
from kvforge.gateway.languages.call_steps import WrittenCall
from kvforge.gateway.languages.marked_text import TOKEN, certain_length


@dataclass(frozen=True)
class Notation:
    """How a text marks its calls.

    Attributes:
        begins: the text with which a call, or a list of calls, begins.
        is_object: that text is the beginning of the call itself, a JSON object.
        opens: what opens the list after it, if there is one.
        separates: what stands between calls of a list.
        closes: what follows the call or ends the list.
        ignored: markers that may stand before a call and say nothing more.
        also: other texts that may stand in the place of `begins`.
    """

    begins: str
    is_object: bool = False
    opens: str = ""
    separates: str = ""
    closes: str = ""
    ignored: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    def with_tokens(self, tokens: Collection[str]) -> "Notation":
        """For texts in which these markers count only as tokens."""

        def mark(text: str) -> str:
            return with_token_marks(text, tokens)

        ignored, also = (tuple(map(mark, texts)) for texts in (self.ignored, self.also))
        return dataclasses.replace(self, begins=mark(self.begins), closes=mark(self.closes), ignored=ignored, also=also)


def with_token_marks(text: str, tokens: Collection[str]) -> str:
    """A text in which these markers are marked as tokens."""
    for token in tokens:
        text = text.replace(token, TOKEN + token)
    return text


class CallReader:
    """`push` pieces of text, then `end`. White space before a call, and behind the last one, is no content;
    what only looked like the beginning of a call is content. How the text is cut into pieces changes nothing but how
    events are cut."""

    def __init__(self, notation: Notation, make_call: Callable[[], WrittenCall], forced: bool = False) -> None:
        """`make_call` makes what reads one call. With `forced`, the text begins with a call: what its notation begins
        with is pushed first."""
        self._notation = notation
        self._make_call = make_call
        self._held = ""
        self._raw = ""
        """The text since the end of the content, in case that it is content, too."""
        self._after_call = False
        self._call = make_call()
        self._step = self._object if forced and notation.is_object else self._content

    @property
    def in_call(self) -> bool:
        """A call has begun, and not all of its arguments are there."""
        return self._step == self._object and self._call.began and not self._call.has_arguments

    def push(self, text: str) -> list[Event]:
        """What a piece makes certain."""
        events: list[Event] = []
        self._held += text
        while self._held and self._step(events):
            pass
        return _shown(events)

    def end(self) -> list[Event]:
        """What the end of the text makes certain: a call that has not begun is content."""
        text = ""
        said: list[Event] = []
        if self._step == self._content:
            text = "" if self._after_call and not self._held.strip() else self._held
        elif self._step == self._list:
            text = self._raw + self._held
        elif self._step == self._object:
            rest = self._call.give_up()
            text = "" if rest is None else self._raw + rest
            said = self._call.end() if rest is None else []
        self._held = self._raw = ""
        return _shown([*said, Text(text)])

    def _content(self, events: list[Event]) -> bool:
        begins = (self._notation.begins, *self._notation.also)
        marks = (*begins, *self._notation.ignored)
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            keep = _uncertain(self._held, marks)
            self._say(events, self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        at, mark = min(found)
        content = self._held[:at].rstrip()
        self._say(events, content)
        if mark not in begins:
            self._held = self._held[len(content) : at] + self._held[at + len(mark) :]
            return True
        begin = at if self._notation.is_object else at + len(mark)
        self._raw, self._held = self._held[len(content) : begin], self._held[begin:]
        self._begin_call()
        self._step = self._list if self._notation.opens else self._object
        return True

    def _list(self, events: list[Event]) -> bool:
        rest = self._held.lstrip()
        if not rest:
            return False
        if not rest.startswith(self._notation.opens):
            self._no_call(events, "")
            return True
        size = len(self._held) - len(rest) + len(self._notation.opens)
        self._raw, self._held = self._raw + self._held[:size], self._held[size:]
        self._step = self._object
        return True

    def _object(self, events: list[Event]) -> bool:
        found, self._held = self._call.push(self._held)
        events += found
        if not self._call.ended:
            return False
        if self._call.text is not None:
            self._no_call(events, self._call.text)
        else:
            self._raw, self._after_call = "", True
            self._step = self._after if self._notation.closes else self._content
        return True

    def _after(self, events: list[Event]) -> bool:
        rest = self._held.lstrip()
        notation = self._notation
        if not rest:
            return False
        if notation.separates and rest.startswith(notation.separates):
            self._raw, self._held = notation.separates, rest[len(notation.separates) :]
            self._begin_call()
            self._step = self._object
            return True
        if len(rest) < len(notation.closes) and notation.closes.startswith(rest):
            return False
        if rest.startswith(notation.closes):
            self._held = rest[len(notation.closes) :]
        self._step = self._content
        return True

    def _begin_call(self) -> None:
        self._call = self._make_call()

    def _no_call(self, events: list[Event], text: str) -> None:
        self._say(events, self._raw + text)
        self._raw = ""
        self._step = self._content

    def _say(self, events: list[Event], text: str) -> None:
        if text:
            self._after_call = False
            events.append(Text(text))


def _shown(events: list[Event]) -> list[Event]:
    """Without what tells tokens apart."""
    shown: list[Event] = []
    for event in events:
        if isinstance(event, Text | Arguments) and TOKEN in event.text:
            event = dataclasses.replace(event, text=event.text.replace(TOKEN, ""))
        if not isinstance(event, Text) or event.text:
            shown.append(event)
    return shown


def _uncertain(text: str, marks: tuple[str, ...]) -> int:
    """Characters at the end of `text` that may be the beginning of a mark, and the white space before them."""
    return len(text) - len(text[: certain_length(text, marks)].rstrip())
