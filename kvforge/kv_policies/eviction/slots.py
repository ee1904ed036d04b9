"""What a rule's score may look at: the vocabulary of scores."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvforge.kv_policies.eviction.expectation import expected_exponent


@dataclass(frozen=True)
class Slots:
    """The cached tokens of S sequences in one owner, before an eviction; all ``[S, kv_heads, L]`` float32.

    The sequences have as many tokens L in the cache. ``num_computed`` and ``num_prompt`` are ``[S, 1, 1]``: the tokens
    that were computed, and of the prompt. Before a sequence's first eviction the order of L is that of the text.
    """

    position: Tensor
    """Of each token in its sequence."""
    num_computed: Tensor
    num_prompt: Tensor
    statistics: dict[str, Tensor]
    read_keys: Callable[[], Tensor]
    read_values: Callable[[], Tensor]
    read_notes: Callable[[str], Tensor]
    read_rope: Callable[[], tuple[Tensor, Tensor]]
    find_tokens: Callable[[Tensor, str], Tensor]

    @property
    def mass(self) -> Tensor:
        """Of the weights that observed queries gave, the mean over a group's heads: their sum, or what the rule's
        ``Statistic`` says."""
        return self.statistics["mass"]

    @property
    def squares(self) -> Tensor:
        """Sum of the squares of those weights."""
        return self.statistics["squares"]

    @property
    def age(self) -> Tensor:
        """How many queries have seen the token, its own among them."""
        return self.num_computed - self.position

    @property
    def keys(self) -> Tensor:
        """``[S, kv_heads, L, d]`` rotated, as attention sees them; read each time, as they are large."""
        return self.read_keys()

    @property
    def values(self) -> Tensor:
        """``[S, kv_heads, L, d]``, read each time."""
        return self.read_values()

    def notes(self, name: str) -> Tensor:
        """The rows ``[S, ...]`` that the sequences have in one of the policy's pools."""
        return self.read_notes(name)

    @property
    def is_special(self) -> Tensor:
        """Whether each token is one of the tokenizer's special ones; only for policies that ``reads_tokens``."""
        return self.find_tokens(self.position, "special")

    @property
    def is_punctuation(self) -> Tensor:
        """Whether each token is punctuation; only for policies that ``reads_tokens``."""
        return self.find_tokens(self.position, "punctuation")

    def newest(self, count: int) -> Tensor:
        """Whether a token is among the ``count`` newest of its sequence."""
        return self.age <= count

    def largest(self, x: Tensor, count: int) -> Tensor:
        """Whether a token is among the ``count`` with the largest ``x``, the newer of equals first."""
        return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, self._order(x)[..., :count], True)

    def ranked(self, *xs: Tensor) -> Tensor:
        """A score that is larger where the first of ``xs`` is, of equals where the next is, at last of newer tokens."""
        order = self._order(*xs)
        ranks = torch.arange(0, -order.shape[-1], -1, dtype=torch.float32, device=order.device)
        return torch.empty_like(self.position).scatter_(-1, order, ranks.expand_as(order))

    def _order(self, *xs: Tensor) -> Tensor:
        """The indices of tokens, those with the largest first of ``xs`` first, then as ``ranked`` says."""
        order = self.position.argsort(dim=-1, descending=True)
        for x in reversed(xs):
            order = order.gather(-1, x.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
        return order

    def over_heads(self, x: Tensor) -> Tensor:
        """The mean over an owner's KV heads, for each of them."""
        total = x[:, :1]
        for head in range(1, x.shape[1]):  # one after the other: the bits must not depend on S or L
            total = total + x[:, head : head + 1]
        return (total / x.shape[1]).expand_as(x)

    def pooled(self, x: Tensor, kernel: int) -> Tensor:
        """The mean of each token and its neighbours, ``kernel`` in all, those beyond the ends being 0."""
        before = (kernel - 1) // 2
        padded, length = F.pad(x, (before, kernel - 1 - before)), x.shape[-1]
        total = padded[..., :length]
        for offset in range(1, kernel):
            total = total + padded[..., offset : offset + length]
        return total / kernel

    def key_similarity(self) -> Tensor:
        """The cosine of each key with the mean of its head's normed keys."""
        keys = self.keys
        return F.cosine_similarity(keys, F.normalize(keys, dim=-1).mean(-2, keepdim=True), dim=-1)

    def expected_exponent(self, window: int, first: int, num_future: int, with_covariance: bool) -> Tensor:
        """``expected_exponent`` ``[1, kv_heads, group, L]`` of a single sequence, from the noted ones of its last
        ``window`` queries, but for those before the position ``first``."""
        length = self.position.shape[-1]
        begin = max(length - window, 0)
        queries = self.notes("queries")[0, max(first - begin, 0) : length - begin]
        return expected_exponent(queries, self.keys[0], self.read_rope(), num_future, with_covariance)[None]

    @staticmethod
    def protect(score: Tensor, protected: Tensor) -> Tensor:
        """``score`` with infinity where ``protected``."""
        return torch.where(protected, torch.inf, score)
