"""The state of one sequence's guided decoding: which tokens keep its text in the asked form."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvforge.errors import KvforgeError, RequestError

_COMPLETE = ("NoExtension", "NoExtensionBias", "EndOfSentence")


class Guide:
    """A matcher of llguidance at some place of its grammar.

    Args:
        matcher: ``llguidance.LLMatcher``.
        num_tokens: tokens the matcher's masks speak of; ids above them are never allowed.
        eos_token_ids: tokens with which the matcher's masks say that the text may end.
        vocab_size: the model's.
    """

    def __init__(self, matcher: Any, num_tokens: int, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._vocab_size = vocab_size

    def start(self) -> "Guide":
        """Return a guide of its own at the same place."""
        return Guide(self._matcher.deep_copy(), self._num_tokens, self._eos_token_ids, self._vocab_size)

    @property
    def accepting(self) -> bool:
        """The text may end here."""
        return self._matcher.is_accepting()

    @property
    def complete(self) -> bool:
        """The text can only end here."""
        return self._matcher.is_stopped() and self._matcher.stop_reason() in _COMPLETE

    def forbidden(self) -> torch.Tensor:
        """Return [vocab_size] bool, True where a token is not the grammar's next; tokens that end texts are not
        the grammar's.

        Raises:
            KvforgeError: the matcher gave up.
        """
        words = np.empty(-(-self._num_tokens // 32), dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        np.bitwise_not(words, out=words)
        known = min(self._num_tokens, self._vocab_size)
        result = np.ones(self._vocab_size, dtype=np.uint8)
        result[:known] = np.unpackbits(words.view(np.uint8), bitorder="little", count=known)
        result[self._eos_token_ids] = 1
        return torch.from_numpy(result.view(np.bool_))

    def accept(self, token: int) -> None:
        """Go on by one token of the text; raises KvforgeError where the grammar does not allow it."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise KvforgeError(f"guided decoding gave up: {message_of(self._matcher)}.")


def check_guide(kind: str, matcher: Any) -> None:
    """Raise RequestError, in llguidance's words, if a new matcher's grammar is not usable."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestError(f"the guide of {kind} cannot be used: {message_of(matcher)}.")


def message_of(matcher: Any) -> str:
    """Return a failed matcher's words as one line without a full stop."""
    words = matcher.get_error().split("<state>")[0].replace("<non-verbose/>", "")
    line = " ".join(words.split()).rstrip(".")
    if line in _COMPLETE:
        return "it allows no text"
    return line if len(line) <= 300 else line[:300] + "…"
