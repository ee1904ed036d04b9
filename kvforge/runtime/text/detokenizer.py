"""Text of a growing sequence, piece by piece, without ever cutting a character."""

from collections.abc import Sequence

from kvforge.runtime.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6
_MAX_WINDOW = 64
_MAX_HELD_CHARS = 16


class Detokenizer:
    """Turns token ids into text incrementally; the cost per token does not grow with the sequence.

    Only a window of recent tokens is decoded: those of the last piece (a decoder may treat the first token of
    a text differently, so a piece needs one before it) and those after it. Trailing U+FFFD may be the
    beginning of a character and are held back until the next token or ``flush``. Bytes that never become
    characters are given out after 16 more characters, so the window stays bounded.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = [int(token) for token in prompt_token_ids[-_CONTEXT_TOKENS:]]
        text = tokenizer.decode(self._window) if self._window else ""
        if text.endswith(REPLACEMENT):
            self._window, text = [], ""
        self._num_context = len(self._window)
        self._num_given = len(text)
        """Characters of the window's text that were given out."""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now certain (often that of this token)."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        settled = len(text.rstrip(REPLACEMENT))
        if settled == len(text) and settled > self._num_given:
            piece = text[self._num_given :]
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            self._num_given = len(self._tokenizer.decode(self._window))
            return piece
        settled = max(settled, len(text) - _MAX_HELD_CHARS)
        piece = text[self._num_given : settled]
        self._num_given = max(self._num_given, settled)
        if len(self._window) > _MAX_WINDOW:
            num_left = max(0, len(text) - self._num_given)
            del self._window[: -_MAX_WINDOW // 2]
            self._num_context = 0
            self._num_given = max(0, len(self._tokenizer.decode(self._window)) - num_left)
        return piece

    def flush(self) -> str:
        """Return what was held back, an incomplete character as U+FFFD."""
        text = self._tokenizer.decode(self._window) if self._window else ""
        piece = text[self._num_given :]
        self._num_given = len(text)
        return piece
