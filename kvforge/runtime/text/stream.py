"""The text of a sequence as the user sees it: whole characters, and no part of what stopped it."""

from collections.abc import Sequence

from kvforge.runtime.requests.outputs import SequenceOutput
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.word_automaton import START
from kvforge.runtime.text.detokenizer import Detokenizer
from kvforge.runtime.text.stop import StopStrings
from kvforge.runtime.text.tokenizer import Tokenizer


class TextStream:
    """Follows a sequence's outputs and gives out its text.

    Text and tokens that could be the beginning of a stop string or stop word are held back until it is clear.
    The end-of-text token, a stop token, a stop word and a stop string are not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids)
        self._strings = StopStrings(params)
        self._words = params.stop_words_automaton
        self._node = START
        self._held: list[int] = []

    def push(self, output: SequenceOutput) -> str:
        """Add a step's output; returns the text it makes certain."""
        tokens = self._held + output.new_token_ids
        if not output.finished:
            keep = len(tokens) - self._num_held(output.new_token_ids)
            self._held = tokens[keep:]
            return "".join(
                self._strings.push(self._detokenizer.push(token), search=False)[0] for token in tokens[:keep]
            )
        self._held = []
        reason = output.stop_reason
        if output.finish_reason == "stop" and not isinstance(reason, str):
            tokens = tokens[: -len(reason)] if isinstance(reason, tuple) else tokens[:-1]
        stopped = output.finish_reason == "stop" and isinstance(reason, str)
        pieces = []
        for i, token in enumerate(tokens):
            last = i == len(tokens) - 1
            piece, found = self._strings.push(self._detokenizer.push(token), search=stopped and last)
            pieces.append(piece)
            if found is not None:
                return "".join(pieces)
        pieces.append(self._strings.push(self._detokenizer.flush(), search=False)[0])
        pieces.append(self._strings.flush())
        return "".join(pieces)

    def _num_held(self, new_token_ids: Sequence[int]) -> int:
        if self._words is None:
            return 0
        for token in new_token_ids:
            self._node = self._words.step(self._node, token)
        return self._words.num_held[self._node]
