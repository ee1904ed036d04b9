"""Which tokens of a prompt the base model computes where the rest of its cache is predicted: numbers alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvforge.common.errors import KvforgeError

Intervals = tuple[tuple[int, int], ...]
"""Half-open intervals of positions, ascending, that neither overlap nor touch."""


@dataclass(frozen=True)
class ExactTokens:
    """The first ``first`` tokens of a prompt are computed by the base model, the last ``last``, and a ``share`` of all
    in blocks of ``block`` tokens, the most important ones by the auxiliary model's attention.

    The last token of a prompt always is, as its logits are needed.
    """

    first: int = 0
    last: int = 1
    share: float = 0.0
    block: int = 16

    def __post_init__(self) -> None:
        if self.first < 0:
            raise KvforgeError(f"--exact-first is {self.first}; give the tokens of the prompt's beginning, 0 or more.")
        if self.last < 1:
            raise KvforgeError(
                f"--exact-last is {self.last}; a prompt's last token is always computed: give 1 or more."
            )
        if not 0 <= self.share <= 1:
            raise KvforgeError(f"--exact-share is {self.share:g}; give a share of the prompt, from 0 to 1.")
        if self.block < 1:
            raise KvforgeError(f"The block of exact tokens is {self.block}; give 1 or more tokens.")

    def num_to_predict(self, num_tokens: int) -> int:
        """Return the tokens of a prompt that an auxiliary model is to run over: all, or 0 where all are computed."""
        return num_tokens if self.first + self.last < num_tokens and self.share < 1 else 0

    def intervals(self, num_tokens: int, importance: Sequence[float] = ()) -> Intervals:
        """Return what of a prompt of ``num_tokens`` is computed by the base model; the last interval ends with it.

        ``importance`` of each token is needed where there is a ``share``; of equally important blocks the first is
        taken.
        """
        chosen = [(0, min(self.first, num_tokens)), (max(0, num_tokens - self.last), num_tokens)]
        wanted = round(self.share * num_tokens)
        if wanted:
            starts = range(0, num_tokens, self.block)
            blocks = [(start, min(start + self.block, num_tokens)) for start in starts]
            means = [sum(importance[start:end]) / (end - start) for start, end in blocks]
            for index in sorted(range(len(blocks)), key=lambda index: (-means[index], index)):
                if wanted <= 0:
                    break
                chosen.append(blocks[index])
                wanted -= blocks[index][1] - blocks[index][0]
        return merge(chosen)


def merge(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union of half-open intervals, empty ones left out."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(each for each in intervals if each[0] < each[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return tuple(merged)
