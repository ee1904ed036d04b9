"""When a sequence ends before its length: stop tokens, stop words (token sequences) and stop strings."""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.sequence import FinishReason, Sequence
from kvforge.runtime.requests.word_automaton import START
from kvforge.runtime.text.detokenizer import Detokenizer
from kvforge.runtime.text.tokenizer import Tokenizer

StopReason = int | str | tuple[int, ...] | None


class StopStrings:
    """Finds the first of ``params.stop`` to complete in a text that arrives in pieces.

    ``held`` is the longest end of the text that begins a stop string; it is not given out yet.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._stop = params.stop
        self._automaton = params.stop_automaton
        self._node = START
        self.held = ""

    def push(self, text: str, search: bool = True) -> tuple[str, str | None]:
        """Add text; returns (text to give out, the stop string that ended it or None).

        Of stop strings that complete at the same character the longest counts. The result does not depend on how the
        text is cut into pieces. With ``search=False`` stop strings that complete in this piece are passed over.
        """
        automaton, node, known = self._automaton, self._node, len(self.held)
        if automaton is None:
            return text, None
        step, longest = automaton.step, automaton.longest
        for index, character in enumerate(text):
            node = step(node, character)
            if search and longest[node] != -1:
                stop = self._stop[longest[node]]
                before = (self.held + text)[: known + index + 1 - len(stop)]
                self.held, self._node = "", START
                return before, stop
        self._node = node
        text = self.held + text
        num_certain = len(text) - automaton.num_held[node]
        self.held = text[num_certain:]
        return text[:num_certain], None

    def flush(self) -> str:
        """Give out what is held back, because no more text comes."""
        held, self.held, self._node = self.held, "", START
        return held


class Stopper:
    """Decides whether a sequence's newest token completes a stop word or stop string."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None, prompt_token_ids: SequenceOf[int]) -> None:
        self._words = params.stop_words_ids
        self._automaton = params.stop_words_automaton
        self._node = START
        self._min_tokens = params.min_tokens
        self._strings = StopStrings(params) if params.stop else None
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids) if params.stop and tokenizer is not None else None

    def check(self, sequence: Sequence) -> StopReason:
        """Look at the token just appended; None to go on. Every token must be shown once, in order.

        Of several stop words the first of the list counts, and a stop word before a stop string.
        """
        allowed = sequence.num_generated >= self._min_tokens
        token = int(sequence.tokens[sequence.length - 1])
        found: str | None = None
        if self._strings is not None and self._detokenizer is not None:
            piece = self._detokenizer.push(token)
            if piece:
                _, found = self._strings.push(piece, search=allowed)
        if self._automaton is not None:
            self._node = self._automaton.step(self._node, token)
            index = self._automaton.first[self._node]
            if allowed and index != -1:
                return tuple(self._words[index])
        return found


def end_of(sequence: Sequence, token: int, eos_token_ids: Collection[int]) -> tuple[FinishReason | None, StopReason]:
    """Return whether the newest ``token`` of a sequence ends it, and by what; it is already among its tokens."""
    detail = sequence.stopper.check(sequence) if sequence.stopper is not None else None
    # No sampler gives one of these before min_tokens unless bad words leave nothing else.
    if token in sequence.stop_ids:
        is_end_of_text = token in eos_token_ids and not sequence.params.ignore_eos
        return "stop", None if is_end_of_text else token
    if detail is not None:
        return "stop", detail
    return ("length", None) if sequence.length == sequence.max_length else (None, None)
