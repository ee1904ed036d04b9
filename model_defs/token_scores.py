"""Scores of tokens as their K and V are written, for KV policies that evict by them (KVzap, arXiv 2601.07891).

An owner's scorer looks at what its K and V are made of: the normed hidden state that enters the layer or, above a cut,
the one that enters the cut. It predicts a number for each KV head.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.config import ModelConfig
from model_defs.layers import Linear, Pool, RMSNorm
from model_defs.weights import SCALAR_COPIES, Source, WeightSpec

SCORERS = "scorers"
"""The graph's module with a scorer for each owner."""
GRAIN = 2.0**-12
SCORE_POOL = 1
"""Which of the policy's pools the scores are in."""


class TokenScorer(nn.Module):
    """One linear layer, or two with GELU between them (section 3.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        units, self.num_heads = config.kv_scorer or 0, config.num_kv_heads
        self.first = Linear(config.hidden_size, units, True, quantizes=False) if units else None
        self.last = Linear(units or config.hidden_size, self.num_heads, False, float32_out=True, quantizes=False)
        self.last_bias = nn.Parameter(torch.empty(SCALAR_COPIES * self.num_heads))

    def forward(self, hidden: Tensor, norm: RMSNorm | None) -> Tensor:
        """Return float32 ``[T, kv_heads]`` of hidden states ``[T, hidden]``, not yet normed: multiples of ``GRAIN``, so
        that tokens which the model does not tell apart have equal scores, in whichever steps they are computed."""
        if hidden.dtype == torch.float32:
            scores = self._exact(hidden if norm is None else norm(hidden))
        else:
            scores = self.last(hidden, norm) if self.first is None else self.last(F.gelu(self.first(hidden, norm)))
            scores = scores + self.last_bias[: self.num_heads].float()
        return ((scores / GRAIN).round() * GRAIN).float()

    def _exact(self, x: Tensor) -> Tensor:
        """Return the scores of normed hidden states, both float64."""
        wide = x.double()
        if self.first is not None:
            wide = F.gelu(F.linear(wide, self.first.weight.double(), self.first.bias.double()))
        return F.linear(wide, self.last.weight.double(), self.last_bias[: self.num_heads].double())


def write_scores(pool: Pool, num_pools: int, scores: Tensor, slot_mapping: Tensor) -> None:
    """Write ``scores`` ``[T, kv_heads]`` to their slots of the policy's pool ``[pages, page_size, kv_heads]``. Tokens
    without a slot write what the first one does, which has one."""
    rows = pool[len(pool) - num_pools + SCORE_POOL]
    token = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    token = torch.where(slot_mapping < 0, 0, token)
    slots = slot_mapping.index_select(0, token).clamp(min=0).long()
    rows.index_put_((slots // rows.shape[1], slots % rows.shape[1]), scores.index_select(0, token))


def scorer_specs(config: ModelConfig) -> Iterator[WeightSpec]:
    """Yield the scorers' tensors, whose sources are those of a scorer's own checkpoint: kvpress' KVzapModel."""
    if config.kv_scorer is None:
        return
    units, heads, hidden = config.kv_scorer, config.num_kv_heads, config.hidden_size
    for index, owner in enumerate(config.owners):
        name, last = f"{SCORERS}.{owner}", f"layers.{index}{'.2' if units else ''}"
        if units:
            first = f"layers.{index}.0"
            yield WeightSpec(f"{name}.first.weight", (Source(f"{first}.weight", (units, hidden)),))
            yield WeightSpec(f"{name}.first.bias", (Source(f"{first}.bias", (units,)),))
        yield WeightSpec(f"{name}.last.weight", (Source(f"{last}.weight", (heads, units or hidden)),))
        yield WeightSpec(f"{name}.last_bias", (Source(f"{last}.bias", (heads,)),) * SCALAR_COPIES)
