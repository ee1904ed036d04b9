"""How little attention changes tokens, for KV policies that give layers budgets by it (SqueezeAttention, arXiv
2404.04793)."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from model_defs.cache_insertion import Pool
from model_defs.cache_observation import StepObservation
from model_defs.lane_attention import LaneAttention, LaneObservation
from model_defs.notes import StepNotes


@dataclass(frozen=True)
class SimilarLanes(LaneObservation):
    """Notes, in the layer that owns a cache, the cosine of each noted token's hidden state before attention with the
    one after it. The third last of an owner's pools is ``similarity`` ``[slots, tokens + 1]``, the last three inputs
    are ``StepNotes``'s."""

    def begin(self, inputs: tuple[Tensor, ...], tables: tuple[Tensor, ...]) -> StepObservation | None:
        return super().begin(inputs[:-3], tables)

    def attention(self, inputs: tuple[Tensor, ...]) -> LaneAttention:
        return super().attention(inputs[:-3])

    def after_attention(self, inputs: tuple[Tensor, ...]) -> "StepSimilarity":
        return StepSimilarity(StepNotes(*inputs[-3:]))


@dataclass(frozen=True)
class StepSimilarity:
    """Notes cosines of a step."""

    notes: StepNotes

    def __call__(self, before: Tensor, after: Tensor, pool: Pool, query_start: Tensor) -> None:
        """See ``AfterAttention``."""
        self.notes.write(pool[-3], F.cosine_similarity(before.float(), after.float(), dim=-1), pool[0], query_start)
