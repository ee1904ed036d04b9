"""The definition of RouteExperts in plain torch."""

import torch
from torch import Tensor


def reference(logits: Tensor, num_active: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Chooses `num_active` = k of E experts for each of T tokens; returns (expert_ids [T, k] int32, weights [T, k]
    float32).

    logits: [T, E] float32, E contiguous. The experts of the greatest logits are chosen, the lowest index of equals and
    NaN before all numbers, and stand in this order. Their weights are softmax(logits) over all experts or, with
    `normalize`, over the chosen ones. A row of the result depends, in all its bits, on its own logits alone.
    Raises RuntimeError on a wrong shape or dtype, and unless 1 <= num_active <= E.
    """
    order = logits.sort(descending=True, stable=True).indices[:, :num_active]
    chosen = logits.gather(1, order)
    weights = chosen.softmax(-1) if normalize else logits.softmax(-1).gather(1, order)
    if normalize:  # an expert that was not chosen may not be a number, but then neither is one that was
        weights = torch.where(logits.isnan().any(-1, keepdim=True), torch.nan, weights)
    return order.int(), weights
