"""The base model over a cache that something else has filled: pieces of a sequence computed where they stand."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvforge.swiftkv import Layout, SwiftKVForCausalLM, make_chunk_layout
from kvforge.swiftkv.attention import KV


def base_kv(base: SwiftKVForCausalLM, owner: int, k: Tensor, v: Tensor, layout: Layout) -> KV:
    """Return K and V as ``owner`` caches them, each ``[B, T, kv_heads, head_dim]``, of what takes the place of its
    projections' results ``[B, T, kv_dim]``: K is normed where the model does so, and rotated."""
    attention = base.model.layers[owner].self_attn
    heads = k.unflatten(-1, attention.head_shape)
    if attention.qk_norm:
        heads = attention.get_submodule("k_norm")(heads)
    return attention.cached(layout.rotate(heads, attention.rope), v.unflatten(-1, attention.head_shape))


class PredictedCache:
    """K and V of one sequence by owner, ``[1, capacity, kv_heads, head_dim]`` each, of which the first tokens are
    ``predicted`` and any may be computed again."""

    def __init__(self, predicted: Mapping[int, KV], capacity: int) -> None:
        self._pools: dict[int, KV] = {}
        for owner, kv in predicted.items():
            pools = tuple(each.new_zeros((1, capacity, *each.shape[2:])) for each in kv)
            for pool, each in zip(pools, kv, strict=True):
                pool[:, : each.shape[1]] = each
            self._pools[owner] = pools[0], pools[1]

    def write(self, owner: int, start: int, kv: KV) -> None:
        """Overwrite the tokens from ``start`` on by ``kv`` ``[1, T, kv_heads, head_dim]``."""
        for pool, new in zip(self._pools[owner], kv, strict=True):
            pool[:, start : start + new.shape[1]] = new

    def read(self, owner: int, end: int) -> KV:
        """Return K and V of the first ``end`` tokens."""
        k, v = self._pools[owner]
        return k[:, :end], v[:, :end]


@torch.inference_mode()
def compute(base: SwiftKVForCausalLM, cache: PredictedCache, input_ids: Tensor, start: int) -> Tensor:
    """Run the base over ``input_ids`` ``[1, T]``, the sequence's tokens from ``start`` on, over what the cache holds of
    those before and with their own K and V, which it then holds; returns the last one's logits ``[vocab]``."""
    end = start + input_ids.shape[1]
    layout = make_chunk_layout(base.sizes, start, end, input_ids.device)
    hidden = base.model.embed(input_ids)
    for owner, layer in enumerate(base.model.layers):
        cache.write(owner, start, layer.self_attn.key_value(layer.input_layernorm(hidden), layout))
        hidden = layer(hidden, cache.read(owner, end), layout)
    return base.head(base.model.norm(hidden[0, -1]))
