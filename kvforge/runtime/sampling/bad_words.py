"""Token sequences that must not be generated, found at a cost that does not grow with their number."""

from collections.abc import Sequence

import torch

from kvforge.runtime.requests.word_automaton import START, WordAutomaton


class BadWords:
    """The bad words of a request, shared by its sequences, which keep the node that they are at.

    Attributes:
        single: int64, tokens that are words by themselves.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        """``words`` are not empty."""
        following: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            following.setdefault(word[:-1], set()).add(word[-1])
        self.single = torch.tensor(sorted(following.pop((), ())), dtype=torch.long)
        self._automaton = WordAutomaton(list(following)) if following else None
        self._last = torch.tensor([token for tokens in following.values() for token in sorted(tokens)])
        self._starts = [0]
        for tokens in following.values():
            self._starts.append(self._starts[-1] + len(tokens))

    def step(self, node: int, token: int) -> int:
        """Return the node after one more generated token; the first is START."""
        return START if self._automaton is None else self._automaton.step(node, token)

    def completed_by(self, node: int) -> list[torch.Tensor]:
        """Return the tokens, int64, that would complete a word of several: a tensor for each beginning of words that
        the sequence ends with."""
        if self._automaton is None:
            return []
        return [self._last[self._starts[i] : self._starts[i + 1]] for i in self._automaton.ends(node)]
