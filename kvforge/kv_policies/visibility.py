"""Which tokens of a sequence go past a blind cut (SPEED, arXiv 2605.06105)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from model_defs import ModelConfig

Count = TypeVar("Count", int, float)
"""Of tokens; means of them in costs."""


@dataclass(frozen=True)
class Visibility:
    """Layers above a blind cut run the first ``num_anchors`` tokens of a sequence, the last one of its prompt and all
    that follow. They keep K and V of these alone, one behind the other: the other tokens of the prompt are hidden."""

    num_anchors: int

    def num_hidden(self, num_prompt_tokens: Count) -> Count:
        """Return how many of a prompt's tokens never go past the cut."""
        return max(num_prompt_tokens - 1 - self.num_anchors, 0)

    def num_seen(self, num_prompt_tokens: Count, num_tokens: Count) -> Count:
        """Return how many of a sequence's first ``num_tokens`` go past the cut. One that does, at position p, has the
        index ``num_seen(num_prompt_tokens, p)`` in the caches above it."""
        return max(min(num_tokens, self.num_anchors), num_tokens - self.num_hidden(num_prompt_tokens))

    def seen(self, num_prompt_tokens: int, start: int, end: int) -> tuple[range, range]:
        """Return which positions from ``start`` to ``end`` go past the cut: those of anchors, and those after hidden
        tokens."""
        behind = self.num_anchors + self.num_hidden(num_prompt_tokens)
        return range(start, min(end, self.num_anchors)), range(max(start, behind), end)


def visibility_of(model: "ModelConfig") -> Visibility | None:
    """Return which tokens go past a model's cut; None where that is not blind, and K and V of all do."""
    return Visibility(model.num_anchors) if model.is_blind else None
