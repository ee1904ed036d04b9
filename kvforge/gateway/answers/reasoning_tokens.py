"""How many of an answer's tokens are its reasoning, its marks among them."""

from collections.abc import Callable, Sequence

from kvforge.gateway.languages.asked_forms import Thinking
from kvforge.gateway.languages.reasoning_formats import reasoning_formats


class ReasoningTokens:
    """Counts the tokens of each choice from the one that begins its reasoning to the one that ends it. Before the
    beginning there may be blanks."""

    def __init__(self, opened: bool, begins: int | None, ends: int, is_blank: Callable[[int], bool]) -> None:
        self._opened, self._begins, self._ends, self._is_blank = opened, begins, ends, is_blank
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        """Choices of which no further token counts."""

    def count(self, choice: int, tokens: Sequence[int]) -> int:
        """How many of a choice's next tokens are reasoning."""
        total = 0
        for token in tokens:
            if choice in self._ended:
                break
            if self._opened or choice in self._begun:
                total += 1
                if token == self._ends:
                    self._ended.add(choice)
            elif token == self._begins:
                total += 1
                self._begun.add(choice)
            elif token == self._ends or not self._is_blank(token):
                self._ended.add(choice)
        return total


def reasoning_tokens(thinking: Thinking | None, is_blank: Callable[[int], bool]) -> ReasoningTokens | None:
    """A counter; None where there is no reasoning or its end is no token of its own."""
    if thinking is None:
        return None
    form = reasoning_formats()[thinking.format]
    ends = thinking.tokens.get(form.ends)
    return None if ends is None else ReasoningTokens(thinking.opened, thinking.tokens.get(form.begins), ends, is_blank)
