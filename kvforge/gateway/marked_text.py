"""Text of a sequence in which chosen special tokens, which are otherwise left out, are seen."""

from collections.abc import Callable, Mapping

from kvforge.runtime.requests.outputs import SequenceOutput
from kvforge.runtime.text.stream import TextStream


class MarkedText:
    """As TextStream, with the texts of `marks` (token id to text) where these tokens stand.

    A mark ends what stands before it: a character that is cut by one will not be completed, and no stop string reaches
    over one.
    """

    def __init__(self, make_stream: Callable[[], TextStream], marks: Mapping[int, str]) -> None:
        self._make_stream = make_stream
        self._marks = marks
        self._stream = make_stream()

    def push(self, output: SequenceOutput) -> str:
        """Add a step's output; returns the text it makes certain."""
        tokens = output.new_token_ids
        pieces = []
        start = 0
        for index, token in enumerate(tokens):
            if token not in self._marks or _ends(output, index):
                continue
            before = SequenceOutput("", 0, tokens[start:index], finished=True, finish_reason="length")
            pieces += [self._stream.push(before), self._marks[token]]
            self._stream = self._make_stream()
            start = index + 1
        last = SequenceOutput("", 0, tokens[start:])
        last.finished, last.finish_reason, last.stop_reason = output.finished, output.finish_reason, output.stop_reason
        return "".join([*pieces, self._stream.push(last)])


def _ends(output: SequenceOutput, index: int) -> bool:
    """Whether a token is what ended the sequence, which is no part of its text."""
    last = index == len(output.new_token_ids) - 1
    return last and output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
