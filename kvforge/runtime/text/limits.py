"""Texts that cannot fit the context are refused at a cost that the context bounds, not the text."""

from dataclasses import dataclass

from kvforge.common.errors import RequestError
from kvforge.common.refusals import CONTEXT_LENGTH, PROMPT
from kvforge.runtime.requests.checks import longer_sequences, too_many_tokens
from kvforge.runtime.text.token_spans import most_bytes
from kvforge.runtime.text.tokenizer import Tokenizer, check_unicode

UNBOUNDED_BYTES, UNBOUNDED_LEAST = 1024, 1 << 20
"""Of text for each token of the context, and in all, where the tokenizer sets no bound: more than any text has that is
one."""
ORDINARY_BYTES = 4
"""For each token of the context. A longer text is counted in pieces, and given up when it is clear what it comes to."""
PIECE = 1 << 14
"""Characters. Tokenizing a text is linear in its length at best, and a character may become dozens of tokens."""
MARGIN, LEAST_TOKENS = 2, 4096
"""Given up at so many times the context, and never before so many times LEAST_TOKENS: where a text is cut its tokens
change, a few for each piece."""


@dataclass(frozen=True)
class TextLimits:
    """The way from a prompt's text to its tokens, for every door. `max_bytes` is of the text in UTF-8."""

    tokenizer: Tokenizer
    max_seq_len: int
    max_bytes: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, max_seq_len: int) -> "TextLimits":
        """For an engine whose sequences have up to `max_seq_len` tokens, one generated token included."""
        bound = most_bytes(tokenizer.backend)
        if bound is None:
            return cls(tokenizer, max_seq_len, max(max_seq_len * UNBOUNDED_BYTES, UNBOUNDED_LEAST))
        return cls(tokenizer, max_seq_len, max_seq_len * bound)

    def encode(self, text: str, add_special_tokens: bool = True, fits: bool = True) -> list[int]:
        """Token ids of ``text``.

        A text that fits the context is always encoded. The refusal of one that does not costs little more than
        the tokens of twice the context do. Without ``fits`` a text that does not fit is encoded, too, where that costs
        no more.

        Raises:
            RequestError: it has too many tokens, is not Unicode, or the tokenizer cannot read it.
        """
        check_unicode(text)
        num_bytes = len(text) if text.isascii() else len(text.encode())
        self.check(num_bytes if fits else num_bytes // MARGIN)
        if num_bytes > max(ORDINARY_BYTES * self.max_seq_len, PIECE):
            self._count(text)
        ids = self.tokenizer.encode(text, add_special_tokens)
        if fits and len(ids) > self.max_seq_len - 1:
            raise too_many_tokens(f"{len(ids)}", self.max_seq_len)
        return ids

    def check(self, num_bytes: int) -> None:
        """Raise RequestError where no text of so many bytes fits; costs nothing, so that an event loop may ask."""
        if num_bytes > self.max_bytes:
            raise RequestError(
                f"has {num_bytes} bytes of text, but no text of more than {self.max_bytes} bytes gives the "
                f"{self.max_seq_len - 1} tokens that the engine takes at most",
                "shorten it",
                field=PROMPT,
                code=CONTEXT_LENGTH,
                operator=longer_sequences(self.max_seq_len),
            )

    def _count(self, text: str) -> None:
        enough, num_tokens = MARGIN * max(self.max_seq_len, LEAST_TOKENS), 0
        for start in range(0, len(text), PIECE):
            num_tokens += self.tokenizer.count(text[start : start + PIECE])
            if num_tokens > enough:
                raise too_many_tokens(f"more than {enough}", self.max_seq_len)
