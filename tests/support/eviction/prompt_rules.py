"""Rules of eviction at a prompt's end in plain torch, one layer at a time, in float64.

``keys`` are ``[kv_heads, tokens, head_dim]`` and ``queries`` ``[heads, last tokens, head_dim]``, both rotated. A score
is ``[kv_heads, tokens]``; larger ones stay and infinite ones are protected.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def attention(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the causal softmax weights ``[heads, queries, tokens]`` of the last queries."""
    group = queries.shape[0] // keys.shape[0]
    products = queries.double() @ keys.double().repeat_interleave(group, dim=0).transpose(1, 2)
    num_queries, num_tokens = products.shape[1:]
    later = torch.ones(num_queries, num_tokens).triu(num_tokens - num_queries + 1).bool()
    return (products * keys.shape[-1] ** -0.5).masked_fill(later, -math.inf).softmax(-1)


def over_group(per_head: Tensor, num_kv_heads: int) -> Tensor:
    """Return the mean over the query heads of each KV head, ``[kv_heads, ...]``."""
    return per_head.unflatten(0, (num_kv_heads, -1)).mean(1)


def streaming(num_kv_heads: int, num_tokens: int, sinks: int) -> Tensor:
    """StreamingLLM (arXiv 2309.17453, section 3.2): the first ``sinks`` tokens and the newest."""
    position = torch.arange(num_tokens).double()
    return position.where(position >= sinks, math.inf).expand(num_kv_heads, -1)


def tova(queries: Tensor, keys: Tensor, protect_last: bool = False) -> Tensor:
    """TOVA (arXiv 2401.06104, section 3.2): the last query's weights, a mean over all heads of the layer. kvpress also
    protects the last token: ``protect_last``."""
    score = attention(queries[:, -1:], keys)[:, 0].mean(0)
    if protect_last:
        score[-1] = math.inf
    return score.expand(keys.shape[0], -1)


def snapkv(queries: Tensor, keys: Tensor, window: int, kernel: int) -> Tensor:
    """SnapKV (arXiv 2404.14469, section 4): what the last ``window`` queries gave the tokens before them, smoothed by a
    mean over ``kernel`` neighbours of which those outside count as 0; the window is protected."""
    num_before = keys.shape[1] - window
    given = over_group(attention(queries[:, -window:], keys), keys.shape[0]).sum(1)[:, :num_before]
    pooled = F.pad(given, (kernel // 2, kernel // 2)).unfold(-1, kernel, 1).sum(-1) / kernel
    return F.pad(pooled, (0, window), value=math.inf)


def mean_attention(queries: Tensor, keys: Tensor) -> Tensor:
    """Batch-Max at the prompt's end, which kvpress calls observed attention: the mean of the weights that a token was
    given, over the queries that saw it."""
    num_tokens = keys.shape[1]
    return over_group(attention(queries, keys), keys.shape[0]).sum(1) / torch.arange(num_tokens, 0, -1)


def lazy_share(queries: Tensor, keys: Tensor, initial: int, recent: int) -> float:
    """SimLayerKV as kvpress decides (arXiv 2410.13846): of what the last query gives, a mean over all heads, the share
    of the first ``initial`` tokens and of the ``recent`` ones just before the last one."""
    given = attention(queries[:, -1:], keys)[:, 0].mean(0)[:-1]
    return float(given[:initial].sum() + given[-recent:].sum())


def keydiff(keys: Tensor) -> Tensor:
    """KeyDiff (arXiv 2504.15364, section 3): how unlike a key is to the mean direction of the lane's keys."""
    directions = F.normalize(keys.double(), dim=-1)
    return -F.cosine_similarity(keys.double(), directions.mean(1, keepdim=True), dim=-1)


def expected_attention(
    queries: Tensor, keys: Tensor, value_norms: Tensor, rope_theta: float, sinks: int, num_future: int
) -> Tensor:
    """Expected attention (arXiv 2510.00636): the weight that a Gaussian query at one of the next ``num_future``
    positions would give, times the norm of the value; sinks are protected. ``queries`` are all of the prompt's: their
    mean and covariance before RoPE are of those after the sinks."""
    num_kv_heads, num_tokens, head_dim = keys.shape
    raw = _rotate(queries.double(), -torch.arange(num_tokens), rope_theta)[:, sinks:]
    mean = raw.mean(1, keepdim=True)
    covariance = (raw - mean).transpose(1, 2) @ (raw - mean) / raw.shape[1]
    future = torch.arange(num_tokens, num_tokens + num_future)
    turn = _rotate(torch.eye(head_dim).double()[:, None].expand(-1, num_future, -1), future, rope_theta).mean(1).T
    mean, covariance = mean @ turn.T, turn @ covariance @ turn.T
    seen = keys.double()[:, sinks:].repeat_interleave(len(queries) // num_kv_heads, dim=0)
    exponent = (seen @ mean.transpose(1, 2))[..., 0] / head_dim**0.5
    exponent += torch.einsum("hnd,hde,hne->hn", seen, covariance, seen) / (2 * head_dim)
    score = over_group(exponent.softmax(-1), num_kv_heads) * value_norms[:, sinks:].double()
    return F.pad(score, (sinks, 0), value=math.inf)


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate ``[..., tokens, head_dim]``: element i and i + head_dim/2 are the two sides of a plane."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** -(torch.arange(half).double() / half)
    one, other = x[..., :half], x[..., half:]
    return torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), -1)


def keep(score: Tensor, budget: int) -> Tensor:
    """Return bool ``[kv_heads, tokens]``: of each lane the ``budget`` largest; among equals the newer token stays."""
    newest_first = score.flip(-1).argsort(dim=-1, descending=True, stable=True)[:, :budget]
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, score.shape[-1] - 1 - newest_first, True)


def keep_in_blocks(keys: Tensor, keep_each: int, block: int) -> Tensor:
    """KeyDiff block by block: whenever a lane holds ``keep_each + block`` tokens, or the prompt ends, it keeps
    ``keep_each``. Returns bool ``[kv_heads, tokens]``."""
    num_kv_heads, num_tokens, _ = keys.shape
    held = torch.zeros(num_kv_heads, num_tokens, dtype=torch.bool)
    held[:, :keep_each] = True
    for start in range(keep_each, num_tokens, block):
        held[:, start : start + block] = True
        for head in range(num_kv_heads):
            positions = held[head].nonzero()[:, 0]
            kept = keep(keydiff(keys[head : head + 1, positions]), keep_each)[0]
            held[head, positions[~kept]] = False
    return held


def keep_over_heads(score: Tensor, budget: int, floor: float) -> Tensor:
    """AdaKV (arXiv 2407.11550): ``budget`` tokens a lane on average; each lane has its ``floor * budget``
    largest for certain and the rest is the largest over all lanes. Returns bool ``[kv_heads, tokens]``."""
    certain = keep(score, max(1, int(budget * floor)))
    everything = score.masked_fill(certain, math.inf).reshape(1, -1)
    return keep(everything, budget * score.shape[0]).view_as(score)


def pyramid_budgets(num_tokens: int, share: float, num_layers: int, window: int, beta: int) -> list[int]:
    """PyramidKV (arXiv 2406.02069) as kvpress counts: the tokens of each of two layers or more, the window
    included, fall linearly and their mean is ``share * num_tokens``. Where no line has at least ``window`` and at most
    ``num_tokens - window`` tokens, all layers have the mean."""
    mean = share * num_tokens
    highest = min(2 * mean - mean / beta, num_tokens - window)
    lowest = 2 * mean - highest
    if not highest >= lowest >= window:
        return [round(mean)] * num_layers
    return [round(highest - layer * (highest - lowest) / (num_layers - 1)) for layer in range(num_layers)]
