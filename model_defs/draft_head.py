"""EAGLE-3 heads (arXiv 2503.01840): a small model of one layer that drafts from hidden states of its target."""

from dataclasses import dataclass

from model_defs.config import ModelConfig

NUM_STATES = 3
"""Hidden states of the target that a head reads: a low, a middle and a high one."""


@dataclass(frozen=True)
class DraftHead:
    """A head and what it reads of its target.

    ``model`` is its one layer, with the target's vocabulary as input. ``layers`` are the target's layers whose incoming
    residual streams it reads; the number of layers stands for what leaves the last one. It gives logits of
    ``draft_vocab`` tokens. With ``norm_before_residual`` the stream of its layer is the normed hidden state. It has an
    embedding of its own where ``own_embedding``.
    """

    model: ModelConfig
    layers: tuple[int, int, int]
    draft_vocab: int
    norm_before_residual: bool = False
    own_embedding: bool = False

    @property
    def width(self) -> int:
        """Numbers of a token that the head's layer works on."""
        return self.model.hidden_size

    def reads_below(self, target: ModelConfig) -> bool:
        """Whether the target's lower graph has all that the head reads, so that prompt tokens have it too."""
        return max(self.layers) <= target.cut

    def passed(self, target: ModelConfig) -> tuple[int, ...]:
        """Return the layers below the cut whose streams go to the upper graph, which reads the rest: none where the
        lower graph has all."""
        if self.reads_below(target):
            return ()
        return tuple(sorted({layer for layer in self.layers if layer < target.cut}))

    def width_passed(self, target: ModelConfig) -> int:
        """Return how many numbers of a token the lower graph gives beside those that pass the cut anyway."""
        return self.width if self.reads_below(target) else len(self.passed(target)) * target.hidden_size
