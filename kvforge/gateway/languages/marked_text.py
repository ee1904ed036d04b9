"""Text of a sequence in which chosen tokens, which are otherwise left out or letters like others, are seen."""

from collections.abc import Callable, Collection, Mapping, Set

from kvforge.runtime.requests.outputs import SequenceOutput
from kvforge.runtime.text.stream import TextStream

TOKEN = "\ud800"
"""Stands before a marker that was a token of its own, and so tells it from the same letters in other tokens: no decoded
text has half characters."""


class MarkedText:
    """As TextStream, with the texts of `marks` (token id to text) where these tokens stand.

    A mark ends what stands before it: a character that is cut by one will not be completed. Stop strings are looked for
    in the text that a client sees. To it belong the letters of the marks `shown`, so that a stop string may reach into
    one: what is left of it then is no mark.
    """

    def __init__(
        self, make_stream: Callable[[], TextStream], marks: Mapping[int, str], shown: Set[int] = frozenset()
    ) -> None:
        """`shown` are those of the marks that are in the client's text; the last letters of their texts there."""
        self._make_stream = make_stream
        self._marks = marks
        self._shown = shown
        self._stream = make_stream()
        self._plain = make_stream() if shown else None
        """The client's text: says how much of it is certain."""
        self._certain = 0
        self._waiting: list[tuple[str, int, bool]] = []
        """Texts, how many letters of the client's text each stands for, and whether it is a mark."""

    def push(self, output: SequenceOutput) -> str:
        """Add a step's output; returns the text it makes certain."""
        stopped = output.finish_reason == "stop" and isinstance(output.stop_reason, str)
        self._waiting += self._pieces(output, keep_stop=self._plain is not None and stopped)
        if self._plain is None:
            certain, self._waiting = self._waiting, []
            return "".join(text for text, _, _ in certain)
        self._certain += len(self._plain.push(output))
        if output.finished and not stopped:
            certain, self._waiting = self._waiting, []
            return "".join(text for text, _, _ in certain)
        return self._release(output.finished)

    def _pieces(self, output: SequenceOutput, keep_stop: bool) -> list[tuple[str, int, bool]]:
        """The output's texts; with `keep_stop` the stop string that ended it is among them."""
        tokens = output.new_token_ids
        pieces = []
        start = 0
        for index, token in enumerate(tokens):
            if token not in self._marks or _ends(output, index):
                continue
            before = SequenceOutput("", 0, tokens[start:index], finished=True, finish_reason="length")
            text, mark = self._stream.push(before), self._marks[token]
            letters = len(mark.removeprefix(TOKEN)) if token in self._shown else 0
            pieces += [(text, len(text), False), (mark, letters, True)]
            self._stream = self._make_stream()
            start = index + 1
        last = SequenceOutput("", 0, tokens[start:])
        last.finished, last.finish_reason, last.stop_reason = output.finished, output.finish_reason, output.stop_reason
        if keep_stop:
            last.finish_reason, last.stop_reason = "length", None
        text = self._stream.push(last)
        return [*pieces, (text, len(text), False)]

    def _release(self, finished: bool) -> str:
        certain = []
        while self._waiting:
            text, letters, is_mark = self._waiting[0]
            if letters > self._certain:
                break
            certain.append(text)
            self._certain -= letters
            del self._waiting[0]
        if self._waiting and self._certain:
            text, letters, is_mark = self._waiting[0]
            if not is_mark or finished:
                text = text[len(text) - letters :]
                certain.append(text[: self._certain])
                self._waiting[0] = (text[self._certain :], letters - self._certain, is_mark)
                self._certain = 0
        return "".join(certain)


def certain_length(text: str, markers: Collection[str]) -> int:
    """The letters of a text that cannot be the beginning of a marker."""
    for start in range(max(len(text) - max(map(len, markers)) + 1, 0), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)


def _ends(output: SequenceOutput, index: int) -> bool:
    """Whether a token is what ended the sequence, which is no part of its text."""
    last = index == len(output.new_token_ids) - 1
    return last and output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
