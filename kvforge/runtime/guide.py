"""The state of one sequence's guided decoding: which tokens keep its text in the asked form."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvforge.errors import KvforgeError


class Guide:
    """A matcher of llguidance at some place of its grammar.

    Copies of a matcher share its lexer and that lexer's limits. A guide whose lexer other copies used up makes a
    matcher of its own, so it gives up only for what its own text needs.

    Args:
        make_matcher: makes an ``llguidance.LLMatcher`` at the start of the grammar.
        num_tokens: tokens the matcher's masks speak of; ids above them are never allowed.
        eos_token_ids: tokens with which the matcher's masks say that the text may end.
        vocab_size: the model's.
    """

    def __init__(
        self,
        make_matcher: Callable[[], Any],
        num_tokens: int,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        matcher: Any = None,
    ) -> None:
        self._make_matcher = make_matcher
        self._num_tokens = num_tokens
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._vocab_size = vocab_size
        self._shares = matcher is not None
        self._matcher = make_matcher() if matcher is None else matcher
        self._tokens: list[int] = []

    def start(self) -> "Guide":
        """Return a guide of its own at the start; call it on one that has not gone on."""
        copy = self._matcher.deep_copy()
        return Guide(self._make_matcher, self._num_tokens, self._eos_token_ids, self._vocab_size, copy)

    def next_tokens(self) -> tuple[torch.Tensor, bool]:
        """Return what may follow: [vocab_size] bool, True where a token cannot go on with the text, and whether
        the text may end here. Tokens that end texts do not go on with it.

        Raises:
            KvforgeError: the matcher gave up.
        """
        words = np.empty(-(-self._num_tokens // 32), dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            self._retry()
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        accepting = self._matcher.is_accepting()
        self._check()
        np.bitwise_not(words, out=words)
        known = min(self._num_tokens, self._vocab_size)
        forbidden = np.ones(self._vocab_size, dtype=np.uint8)
        forbidden[:known] = np.unpackbits(words.view(np.uint8), bitorder="little", count=known)
        forbidden[self._eos_token_ids] = 1
        return torch.from_numpy(forbidden.view(np.bool_)), accepting

    def accept(self, token: int) -> None:
        """Go on by one token of the text; raises KvforgeError where the grammar does not allow it."""
        self._tokens.append(token)
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            self._retry()
        self._check()

    def is_sound(self) -> bool:
        """The matcher can say what may follow."""
        self._matcher.compute_bitmask()
        return not self._matcher.is_error()

    def message(self) -> str:
        """Why it is not sound, in llguidance's words as one line without a full stop."""
        words = self._matcher.get_error().split("<state>")[0].replace("<non-verbose/>", "")
        line = " ".join(words.split()).rstrip(".")
        if line.startswith("NoExtension"):
            return "it allows no text"
        return line if len(line) <= 300 else line[:300] + "…"

    def _retry(self) -> None:
        if self._shares:
            self._shares = False
            self._matcher = self._make_matcher()
            self._matcher.consume_tokens(self._tokens)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise KvforgeError(f"guided decoding gave up: {self.message()}.")
