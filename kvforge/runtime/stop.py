"""When a sequence ends before its length: stop tokens, stop words (token sequences) and stop strings."""

from collections.abc import Sequence as SequenceOf

from kvforge.runtime.detokenizer import Detokenizer
from kvforge.runtime.sampling_params import SamplingParams
from kvforge.runtime.sequence import Sequence
from kvforge.runtime.tokenizer import Tokenizer

StopReason = int | str | tuple[int, ...] | None


class StopStrings:
    """Finds the first stop string to complete in a text that arrives in pieces.

    ``held`` is the longest end of the text that begins a stop string; it is not given out yet.
    """

    def __init__(self, stop: SequenceOf[str]) -> None:
        self._stop = tuple(stop)
        self._max_held = max((len(s) for s in self._stop), default=1) - 1
        self.held = ""

    def push(self, text: str, search: bool = True) -> tuple[str, str | None]:
        """Add text; returns (text to give out, the stop string that ended it or None).

        The result does not depend on how the text is cut into pieces. With ``search=False`` stop strings that
        complete in this piece are passed over.
        """
        known, text = len(self.held), self.held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stop if search else ():
            at = text.find(stop, max(0, known - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is not None:
            self.held = ""
            return text[: best[1]], best[2]
        held = next(
            (
                k
                for k in range(min(self._max_held, len(text)), 0, -1)
                if any(len(s) > k and s.startswith(text[-k:]) for s in self._stop)
            ),
            0,
        )
        self.held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """Give out what is held back, because no more text comes."""
        held, self.held = self.held, ""
        return held


class Stopper:
    """Decides whether a sequence's newest token completes a stop word or stop string."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None, prompt_token_ids: SequenceOf[int]) -> None:
        self._words = tuple(tuple(word) for word in params.stop_words_ids)
        self._min_tokens = params.min_tokens
        self._strings = StopStrings(params.stop) if params.stop else None
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids) if params.stop and tokenizer is not None else None

    def check(self, sequence: Sequence) -> StopReason:
        """Look at the token just appended; None to go on. Every token must be shown once, in order."""
        num_generated = sequence.num_generated
        allowed = num_generated >= self._min_tokens
        found: str | None = None
        if self._strings is not None and self._detokenizer is not None:
            piece = self._detokenizer.push(int(sequence.tokens[sequence.length - 1]))
            if piece:
                _, found = self._strings.push(piece, search=allowed)
        if allowed:
            for word in self._words:
                if len(word) <= num_generated and ends_with(sequence, word):
                    return word
        return found


def ends_with(sequence: Sequence, word: tuple[int, ...]) -> bool:
    """The sequence's last tokens are ``word``."""
    end = sequence.length
    return len(word) <= end and tuple(sequence.tokens[end - len(word) : end].tolist()) == word
