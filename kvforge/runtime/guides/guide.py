"""The state of one sequence's guided decoding: which tokens keep its text in the asked form."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvforge.common.native_calls import is_panic
from kvforge.runtime.guides.budget import GuideBudget
from kvforge.runtime.guides.messages import is_lexers, message_of
from kvforge.runtime.requests.guided_decoding import gave_up


class Guide:
    """A matcher of llguidance at some place of its grammar.

    Copies of a matcher share its lexer and that lexer's limits. A guide whose lexer other copies used up makes a
    matcher of its own, where that is quick, so that it gives up only for what its own text needs.

    Args:
        make_matcher: makes an ``llguidance.LLMatcher`` at the start of the grammar.
        num_tokens: tokens the matcher's masks speak of; ids above them are never allowed.
        eos_token_ids: tokens with which the matcher's masks say that the text may end.
        vocab_size: the model's.
        budget: what all guides of a request may take.
        making_s: processor time that it took to make ``matcher``; measured where there is none.
    """

    def __init__(
        self,
        make_matcher: Callable[[], Any],
        num_tokens: int,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        matcher: Any = None,
        budget: GuideBudget | None = None,
        making_s: float = 0.0,
    ) -> None:
        started = time.thread_time()
        self._make_matcher = make_matcher
        self._num_tokens = num_tokens
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._vocab_size = vocab_size
        self._shares = matcher is not None
        self._matcher = make_matcher() if matcher is None else matcher
        self._making_s = making_s or time.thread_time() - started
        self._budget = GuideBudget() if budget is None else budget
        self._tokens: list[int] = []
        self._consuming_s = self.checking_s = 0.0

    def start(self, budget: GuideBudget | None = None) -> "Guide":
        """Return a guide of its own at the start, with this one's budget or another; call it on one that has not gone
        on."""
        return Guide(
            self._make_matcher, self._num_tokens, self._eos_token_ids, self._vocab_size, self._matcher.deep_copy(),
            budget or self._budget, self._making_s,
        )  # fmt: skip

    def next_tokens(self) -> tuple[torch.Tensor, bool]:
        """Return what may follow: [vocab_size] bool, True where a token cannot go on with the text, and whether
        the text may end here. Tokens that end texts do not go on with it.

        Raises:
            KvforgeError: the matcher gave up, or the request's guides have taken too much time.
        """
        words = np.empty(-(-self._num_tokens // 32), dtype=np.uint32)
        self._budget.begin()
        try:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                self._retry()
                self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            accepting = self._matcher.is_accepting()
        except BaseException as error:
            raise _gave_up(error) from None
        self._budget.end()
        self._check()
        np.bitwise_not(words, out=words)
        known = min(self._num_tokens, self._vocab_size)
        forbidden = np.ones(self._vocab_size, dtype=np.uint8)
        forbidden[:known] = np.unpackbits(words.view(np.uint8), bitorder="little", count=known)
        forbidden[self._eos_token_ids] = 1
        return torch.from_numpy(forbidden.view(np.bool_)), accepting

    def accept(self, token: int) -> None:
        """Go on by one token of the text; raises KvforgeError where the grammar does not allow it, or as
        ``next_tokens`` does."""
        self._tokens.append(token)
        self._budget.begin()
        try:
            self._matcher.consume_token(token)
            if self._matcher.is_error():
                self._retry()
        except BaseException as error:
            raise _gave_up(error) from None
        self._budget.end()
        self._consuming_s += self._budget.last_s
        self._check()

    def is_sound(self) -> bool:
        """The matcher can say what may follow. How long it took to say so is in ``checking_s``."""
        started = time.thread_time()
        self._matcher.compute_bitmask()
        self.checking_s = time.thread_time() - started
        return not self._matcher.is_error()

    def _retry(self) -> None:
        """With a lexer of its own, where it is the lexer that gave up, and to make another matcher and go through the
        text again is within the budget. The parser's limits are its own already."""
        if self._shares and is_lexers(self._matcher) and self._budget.allows(self._making_s + self._consuming_s):
            self._shares = False
            self._matcher = self._make_matcher()
            self._matcher.consume_tokens(self._tokens)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise gave_up(message_of(self._matcher))


def _gave_up(error: BaseException) -> BaseException:
    """The error for a panic of the matcher; every other one as it is."""
    if is_panic(error):
        return gave_up("llguidance fails at this place of the text")
    return error
