"""Draft heads: small models of one layer that draft from hidden states of their target. There are EAGLE-3 heads (arXiv
2503.01840), and modules for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from model_defs.config import ModelConfig

HeadKind = Literal["eagle3", "mtp"]
"""What a head is; speculation with it goes by the same name."""

NUM_STATES = 3
"""Hidden states of the target that an EAGLE-3 head reads: a low, a middle and a high one."""
STATES_OF: Mapping[HeadKind, int] = {"eagle3": NUM_STATES, "mtp": 1}
"""How many hidden states each kind of head reads."""


@dataclass(frozen=True)
class DraftHead:
    """A head and what it reads of its target.

    ``model`` is its one layer, with the target's vocabulary as input. ``layers`` are the target's layers whose incoming
    residual streams it reads; the number of layers stands for what leaves the last one, which is all that a module for
    multi-token prediction reads. It gives logits of ``draft_vocab`` tokens. With ``norm_before_residual`` the stream of
    its layer is the normed hidden state. It has an embedding and an LM head of its own where ``own_embedding`` and
    ``own_lm_head``, else the target's. A module reads states that the target has in another basis where ``is_turned``.
    """

    model: ModelConfig
    layers: tuple[int, ...]
    draft_vocab: int
    norm_before_residual: bool = False
    own_embedding: bool = False
    own_lm_head: bool = True
    is_turned: bool = False
    kind: HeadKind = "eagle3"

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
