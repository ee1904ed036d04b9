"""How little attention changes tokens, for KV policies that give layers budgets by it (SqueezeAttention, arXiv
2404.04793)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from model_defs.cache_observation import StepObservation
from model_defs.lane_attention import LaneObservation


@dataclass(frozen=True)
class SimilarLanes(LaneObservation):
    """Notes, in the layer that owns a cache, the cosine of each noted token's hidden state before attention with the
    one after it. The third last of an owner's pools is ``similarity`` ``[slots, tokens + 1]``, the three inputs before
    the last are ``StepSimilarity``'s."""

    def begin(
        self, inputs: tuple[Tensor, ...], rope_cos: Tensor | None, rope_sin: Tensor | None
    ) -> StepObservation | None:
        """See ``CacheInsertion``."""
        return super().begin((*inputs[:-4], inputs[-1]), rope_cos, rope_sin)

    def after_attention(self, inputs: tuple[Tensor, ...]) -> "StepSimilarity":  # type: ignore[override]
        """See ``CacheInsertion``."""
        return StepSimilarity(*inputs[-4:-1])


@dataclass(frozen=True)
class StepSimilarity:
    """Of a step's S sequences, int32 ``[S]``: the rows of ``similarity`` that they have, how many of their last queries
    are noted, and the place of the first of these."""

    slot: Tensor
    num_noted: Tensor
    place: Tensor
    seen: list[Tensor] = field(default_factory=list)
    """K pools whose owners have noted."""

    def __call__(self, before: Tensor, after: Tensor, pool: tuple[Tensor, ...], query_start: Tensor) -> None:
        """See ``AfterAttention``."""
        if any(pool[0] is one for one in self.seen):
            return
        self.seen.append(pool[0])
        similarity, token = pool[-3], torch.arange(before.shape[0], dtype=torch.int32, device=before.device)
        row = torch.bucketize(token, query_start[1:], right=True)
        behind = token - query_start[1:][row] + self.num_noted[row]
        # Those that are not noted share the last place of the first row, which nobody reads.
        rows = torch.where(behind >= 0, self.slot[row], 0).long()
        places = torch.where(behind >= 0, self.place[row] + behind, similarity.shape[1] - 1).long()
        similarity.index_put_((rows, places), F.cosine_similarity(before.float(), after.float(), dim=-1))
