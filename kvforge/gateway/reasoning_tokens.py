"""How many of an answer's tokens are its reasoning, its marks among them."""

from collections.abc import Sequence

from kvforge.gateway.parsed_request import Thinking
from kvforge.gateway.reasoning_formats import reasoning_formats

_BLANKS = 1
"""Tokens that may stand before the reasoning's beginning."""


class ReasoningTokens:
    """Counts the tokens of each choice up to the one that ends its reasoning."""

    def __init__(self, opened: bool, begins: int | None, ends: int) -> None:
        self._opened, self._begins, self._ends = opened, begins, ends
        self._waiting: dict[int, int] = {}
        """Tokens of choices whose reasoning has not begun; a choice that is reasoning has none."""
        self._ended: set[int] = set()

    def count(self, choice: int, tokens: Sequence[int]) -> int:
        """How many of a choice's next tokens are reasoning."""
        total = 0
        for token in tokens:
            if choice in self._ended:
                break
            if not self._opened and self._waiting.get(choice, 0) <= _BLANKS:
                total += self._wait(choice, token)
            else:
                total += 1
                if token == self._ends:
                    self._ended.add(choice)
        return total

    def _wait(self, choice: int, token: int) -> int:
        if token == self._begins:
            self._waiting[choice] = _BLANKS + 1
            return 1
        self._waiting[choice] = self._waiting.get(choice, 0) + 1
        if self._waiting[choice] > _BLANKS:
            self._ended.add(choice)
        return 0


def reasoning_tokens(thinking: Thinking | None) -> ReasoningTokens | None:
    """A counter; None where there is no reasoning or its end is no token of its own."""
    if thinking is None:
        return None
    form = reasoning_formats()[thinking.format]
    ends = thinking.tokens.get(form.ends)
    return None if ends is None else ReasoningTokens(thinking.opened, thinking.tokens.get(form.begins), ends)
