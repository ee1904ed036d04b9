"""Observing: tokens that go past the cut for their attention's sake."""

from abc import ABC, abstractmethod


class Observing(ABC):
    """A policy that looks at attention above the cut, where prompt tokens do not come otherwise."""

    @abstractmethod
    def num_observers(self, num_prompt_tokens: int, start: int, end: int) -> int:
        """Return how many of the last of the tokens from ``start`` to ``end``, no transition between them, go past the
        cut though no token follows them."""
