"""How much attention tokens get from the end of a prompt."""

import torch
from torch import Tensor

NUM_QUERIES = 64
"""The last tokens of a prompt whose attention counts."""


def mean_attention(q: Tensor, k: Tensor, scale: float, window: int = 0) -> Tensor:
    """Return ``[n]`` float32: of each of n tokens the attention that it gets, over the heads and over those queries
    that can see it, on average.

    ``q`` ``[m, heads, head_dim]`` are the rotated queries of the last m tokens, ``k`` ``[n, kv_heads, head_dim]`` the
    rotated keys of all.
    """
    num_queries, num_keys = q.shape[0], k.shape[0]
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    seen = (distance >= 0) & ((distance < window) if window else True)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights.sum((0, 1)) / q.shape[1] / seen.sum(0).clamp(min=1)
