"""A second opinion on the oracle: a model layer by layer, eviction as masks of dense attention matrices.

Nothing is shared with the oracle. A rotation is the phase of complex numbers, and all tokens go through a layer before
any goes through the next one: above a cut too, where the prompt's are of no consequence to others. So a layer evicts by
its own attention: with AcrossKV, rules that observe attention are not for it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model_defs import ModelConfig
from model_defs.rope import inverse_frequencies


@dataclass(frozen=True)
class Past:
    """One layer when p tokens are computed: ``weights`` ``[kv_heads, p, p]`` of each query (rows), a mean over the
    heads of a group; what each query ``sees``, bool and of the same shape; the rotated ``keys`` ``[kv_heads, p, d]``
    as complex numbers; and which tokens are ``alive``, bool ``[kv_heads, p]``."""

    weights: Tensor
    sees: Tensor
    keys: Tensor
    alive: Tensor


Scores = Callable[[Past], Tensor]
"""A rule: the score ``[kv_heads, p]`` of each token, infinite for those that stay."""


def dense(
    config: ModelConfig, weights: Mapping[str, Tensor], ids: Tensor, due: Mapping[int, int], scores: Scores, sinks: int
) -> tuple[Tensor, dict[tuple[int, int, int], tuple[int, ...]]]:
    """Return logits ``[n, vocab]`` and what is kept, by (p, layer, KV head). ``due`` is how many tokens are kept when p
    are computed. The first ``sinks`` positions are rotated on as tokens are evicted."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    kept: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], config.rms_norm_eps)

    def heads(x: Tensor, name: str) -> Tensor:
        y = linear(x, name).reshape(len(x), -1, config.head_dim)
        gain = name.replace("_proj", "_norm")
        return (norm(y, gain) if f"{gain}.weight" in w else y).transpose(0, 1)

    hidden = w["model.embed_tokens.weight"][ids]
    at_cut, k, v = hidden, hidden, hidden
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        x = norm(hidden, f"{name}.input_layernorm")
        if layer < config.cut:
            q, k, v = (heads(x, f"{name}.self_attn.{part}_proj") for part in "qkv")
        else:
            at_cut = norm(hidden, "model.norm_swiftkv") if layer == config.cut else at_cut
            q = heads(x, f"{name}.self_attn.q_proj_swiftkv")
            if (layer - config.cut) % config.group_size == 0:
                k, v = (heads(at_cut, f"{name}.self_attn.{part}_proj_swiftkv") for part in "kv")
        attention, sees = _attention(config, q, k, due, scores, sinks)
        for p in due:
            for head in range(config.num_kv_heads):
                kept[p, layer, head] = tuple(sees[head, p, :p].nonzero()[:, 0].tolist())
        mixed = attention @ v.repeat_interleave(len(q) // len(v), 0)
        hidden = hidden + linear(mixed.transpose(0, 1).flatten(1), f"{name}.self_attn.o_proj")
        x = norm(hidden, f"{name}.post_attention_layernorm")
        gated = F.silu(linear(x, f"{name}.mlp.gate_proj")) * linear(x, f"{name}.mlp.up_proj")
        hidden = hidden + linear(gated, f"{name}.mlp.down_proj")
    return linear(norm(hidden, "model.norm"), "model.embed_tokens" if config.tie_embeddings else "lm_head"), kept


def _attention(
    config: ModelConfig, q: Tensor, k: Tensor, due: Mapping[int, int], scores: Scores, sinks: int
) -> tuple[Tensor, Tensor]:
    """Return attention weights ``[heads, n, n]`` and what each query sees, bool ``[kv_heads, n, n]``."""
    kv_heads, n, d = k.shape
    position = torch.arange(n)
    evicted = torch.tensor([max((p - keep for p, keep in due.items() if p <= i), default=0) for i in range(n)])
    distance = position[:, None] - position[None, :] - evicted[:, None] * (position < sinks)[None, :]
    frequency = inverse_frequencies(config.rope, d).double()
    phase = torch.exp(1j * distance[..., None] * frequency)
    as_complex = [torch.complex(part[..., : d // 2], part[..., d // 2 :]) for part in (q, k)]
    queries, keys = as_complex[0].unflatten(0, (kv_heads, -1)), as_complex[1]
    logits = torch.einsum("hgif,hjf,ijf->hgij", queries, keys.conj(), phase).real / math.sqrt(d)
    turned = keys * torch.exp(1j * position[:, None] * frequency)
    weights = torch.zeros_like(logits)
    sees = torch.zeros(kv_heads, n, n, dtype=torch.bool)
    for i in range(n):
        if i:
            sees[:, i, :i] = sees[:, i - 1, :i]
        if i in due:
            past = Past(weights.mean(1)[:, :i, :i], sees[:, :i, :i], turned[:, :i], sees[:, i, :i])
            best = scores(past).masked_fill(~past.alive, -math.inf).topk(due[i], -1).indices
            sees[:, i, :i] = torch.zeros(kv_heads, i, dtype=torch.bool).scatter(1, best, True)
        sees[:, i, i] = True
        weights[:, :, i] = logits[:, :, i].masked_fill(~sees[:, None, i], -math.inf).softmax(-1)
    return weights.flatten(0, 1), sees
