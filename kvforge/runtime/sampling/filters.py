"""Which tokens of a row may be drawn: the parameters that drop improbable ones, a column each."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kvforge.runtime.sampling.state import SamplingState

_LEAST = 1e-6
"""Of a temperature and of top_p: the most probable token alone is left."""


class Filters(NamedTuple):
    """Temperature and filters of R rows. What is kept is a prefix of a row's tokens sorted by probability: min_p, then
    the top_k of those, then the fewest of those whose renormalised probability reaches top_p.

    Attributes:
        temperature: [R] float32, above 0.
        top_k: [R] int64, the size of the vocabulary where it is off.
        top_p: [R] float32 in (0, 1], 1 where it is off.
        min_p: [R] float32 in [0, 1], 0 where it is off.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, states: Sequence[SamplingState], logits: torch.Tensor) -> "Filters":
        """Return those of the sequences whose ``logits`` are [R, vocab_size]."""
        vocab_size = logits.shape[1]

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=logits.device)

        params = [state.params for state in states]
        counts = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
        return cls(
            column([max(p.temperature, _LEAST) for p in params]),
            torch.tensor(counts, device=logits.device),
            column([max(state.top_p, _LEAST) for state in states]),
            column([p.min_p for p in params]),
        )

    def rows(self, index: torch.Tensor | list[int]) -> "Filters":
        """Return those of the rows [n] of ``index``."""
        return Filters(*(column[index] for column in self))

    def blocks(self, num_rows: int) -> Iterator["Filters"]:
        """Yield those of ``num_rows`` rows after another."""
        return map(Filters, *(column.split(num_rows) for column in self))

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return [R, vocab_size] at the temperatures, before any filter."""
        return (logits - logits.amax(-1, keepdim=True)).div_(self.temperature[:, None]).softmax(-1)

    def sorts(self, vocab_size: int) -> torch.Tensor:
        """Return [R] bool: what is kept cannot be told without sorting the row; the others have ``floor``."""
        return (self.top_k < vocab_size) | (self.top_p < 1)

    def drops(self, vocab_size: int) -> bool:
        """Whether any row may lose a token."""
        return bool((self.sorts(vocab_size) | self.has_floor).any())

    @property
    def has_floor(self) -> torch.Tensor:
        """[R] bool: ``floor`` may drop a token of the row."""
        return self.min_p > 0

    def floor(self, largest: torch.Tensor) -> torch.Tensor:
        """Return [R]: the least probability that a row keeps whose largest is ``largest`` [R]."""
        return self.min_p * largest

    def keep_prefix(self, top: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zero what is dropped of a row's most probable tokens [R, C], sorted.

        Returns those probabilities and [R] bool: whether C candidates were enough to know. They are if top_k or
        ``floor`` ends among them, or if only top_p is on (its mass then refers to the whole distribution, 1) and is
        reached.
        """
        num_candidates = top.shape[1]
        rank = torch.arange(num_candidates, device=top.device)
        kept = (rank < self.top_k[:, None]) & (top >= self.floor(top[:, 0])[:, None])
        bounded = (kept.sum(-1) < num_candidates) | (self.top_k <= num_candidates) | (num_candidates == vocab_size)
        mass = torch.where(kept, top, 0.0)
        cumulative = mass.cumsum(-1)
        needed = self.top_p * torch.where(bounded, cumulative[:, -1], 1.0)
        nucleus = (cumulative - mass < needed[:, None]) | (self.top_p >= 1)[:, None]
        reached = ~self.has_floor & (self.top_k >= vocab_size) & (self.top_p < 1) & (cumulative[:, -1] >= needed)
        return torch.where(nucleus, mass, 0.0), bounded | reached
