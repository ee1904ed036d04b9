"""What KVzip+ scores the tokens of a text (arXiv 2601.07891, section 3.1): how a model that repeats it sees them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvforge.swiftkv import Layout, SwiftKVForCausalLM, make_layout
from kvforge.swiftkv.attention import KV, SwiftKVAttention

LEAST = 1e-9
"""Scores below this count as it: rounding makes zeros of them, which have no logarithm."""


@torch.inference_mode()
def repetition_scores(
    model: SwiftKVForCausalLM, ids: Sequence[int], request: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Return of each owner, in order, what its K and V of ``ids`` are made of, ``[T, hidden]`` bfloat16, and the
    logarithms of their scores, ``[T, kv_heads]`` float32.

    The model reads ``ids``, then ``request``, then ``ids`` again. A token's score is the largest, over heads of its
    group and tokens of the repetition, of weight * ||W_o v|| / ||h||, h being the normed input of the attention that
    gives the weight; of layers that share a cache the largest of all.
    """
    config, decoder = model.sizes, model.model
    tokens, length = torch.tensor([[*ids, *request, *ids]]), len(ids)
    layout = make_layout(config, tokens.shape[1])
    hidden = decoder.embed(tokens)
    single, shared = hidden, dict[int, KV]()
    inputs: dict[int, Tensor] = {}
    scores: dict[int, Tensor] = {}
    for index, owner in enumerate(config.owner_of_layer):
        layer, above = decoder.layers[index], config.is_swiftkv and index >= config.cut
        if config.is_swiftkv and index == config.cut:
            single = decoder.norm_swiftkv(hidden)
        x = layer.input_layernorm(hidden)
        if owner == index:
            source = single if above else x
            shared[owner], inputs[owner] = layer.self_attn.key_value(source, layout), source[0, :length].bfloat16()
        found = _largest(layer.self_attn, x, shared[owner], layout, length)
        scores[owner] = torch.maximum(scores[owner], found) if owner in scores else found
        hidden = layer(hidden, shared[owner], layout)
    return [(inputs[owner], scores[owner].clamp(min=LEAST).log().T) for owner in config.owners]


def _largest(attention: SwiftKVAttention, x: Tensor, kv: KV, layout: Layout, length: int) -> Tensor:
    """Return ``[kv_heads, length]``: of the first tokens, what the last ``length`` give."""
    q = attention.query(x, layout)[0, -length:].float().transpose(0, 1)
    k, v = (each[0].float().transpose(0, 1) for each in kv)
    kv_heads, num_tokens, dim = k.shape
    norms = x[0, -length:].float().norm(dim=-1)
    of_heads = attention.o_proj.weight.float().unflatten(1, (-1, dim)).transpose(0, 1)
    place = torch.arange(num_tokens - length, num_tokens)
    later = torch.arange(num_tokens) > place[:, None]
    largest = torch.zeros(kv_heads, length)
    for head, (queries, out) in enumerate(zip(q, of_heads, strict=True)):
        one = head * kv_heads // len(q)
        weights = (queries @ k[one].T * attention.scale).masked_fill(later, -torch.inf).softmax(-1)[:, :length]
        written = (v[one, :length] @ out.T).norm(dim=-1)
        largest[one] = torch.maximum(largest[one], (weights / norms[:, None]).amax(0) * written)
    return largest
