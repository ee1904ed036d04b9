"""Which of many words a growing sequence ends with, found at a cost that does not grow with their number."""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

START = 0
"""The node at which nothing of any word was read."""


class WordAutomaton:
    """The automaton of Aho and Corasick (CACM 18(6), 1975) for words of characters or of token ids.

    A node stands for the longest end of what was read that begins a word. Nothing changes after it was made, so that
    sequences share it and keep a node each. Making it takes time and memory by the words' length together.

    Attributes:
        longest: at each node, the index of the longest word that ends there, -1 for none.
        first: at each node, the smallest index of a word that ends there, -1 for none.
        num_held: at each node, how many of the newest symbols begin a word that is not complete.
    """

    def __init__(self, words: Sequence[Sequence[Hashable]]) -> None:
        """``words`` are not empty; of equal ones the first counts."""
        children: list[dict[Any, int]] = [{}]
        ends = [-1]
        for index, word in enumerate(words):
            node = START
            for symbol in word:
                following = children[node].get(symbol)
                if following is None:
                    following = children[node][symbol] = len(children)
                    children.append({})
                    ends.append(-1)
                node = following
            if ends[node] == -1:
                ends[node] = index
        self._children = children
        self._ends = array("i", ends)
        self._fallback = array("i", bytes(4 * len(children)))
        self._shorter = array("i", bytes(4 * len(children)))
        """The node of the longest shorter end at which a word ends, START for none."""
        self.longest, self.first = array("i", ends), array("i", ends)
        self.num_held = array("i", bytes(4 * len(children)))
        self._link()

    def step(self, node: int, symbol: Hashable) -> int:
        """Return the node after one more symbol; over a whole text it looks at two children a symbol at most."""
        following = self._children[node].get(symbol)
        while following is None and node != START:
            node = self._fallback[node]
            following = self._children[node].get(symbol)
        return following or START

    def ends(self, node: int) -> Iterator[int]:
        """Yield the index of every word that ends at a node, the longest first."""
        while node != START:
            if self._ends[node] != -1:
                yield self._ends[node]
            node = self._shorter[node]

    def _link(self) -> None:
        """Fill in what a node takes from the node it falls back to, level by level: that one is on an earlier level."""
        level, depth = [START], 0
        while level:
            below = []
            for node in level:
                back = self._fallback[node]
                if node != START:
                    self._inherit(node, back, depth)
                for symbol, child in self._children[node].items():
                    if node != START:
                        self._fallback[child] = self.step(back, symbol)
                    below.append(child)
            level, depth = below, depth + 1

    def _inherit(self, node: int, back: int, depth: int) -> None:
        self._shorter[node] = back if self._ends[back] != -1 else self._shorter[back]
        if self.longest[node] == -1:
            self.longest[node] = self.longest[back]
        if self.first[node] == -1 or -1 < self.first[back] < self.first[node]:
            self.first[node] = self.first[back]
        self.num_held[node] = depth if self._children[node] else self.num_held[back]
