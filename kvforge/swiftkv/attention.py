"""Attention of one layer: the teacher's projections below the cut, SwiftKV's above it, or both above it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvforge.swiftkv.norms import make_norm_of_heads
from kvforge.swiftkv.token_layout import BLIND, Layout
from model_defs import ModelConfig

KV = tuple[Tensor, Tensor]
"""Rotated K, and V, each ``[B, T, kv_heads, head_dim]``."""


class SwiftKVAttention(nn.Module):
    """The projections of one layer. Above the cut they end in ``_swiftkv``, K and V are in the group's owner only, and
    ``with_teacher`` adds those the layer had before (arXiv 2410.03960, sections 3.2, 3.3 and 4). Above a blind cut they
    are the layer's own, and who is not the teacher sees no prompt."""

    def __init__(self, config: ModelConfig, layer: int, with_teacher: bool = False) -> None:
        super().__init__()
        self.head_shape = (-1, config.head_dim)
        self.window, self.scale = config.layer_windows[layer], config.score_scale(layer)
        self.rope, self.teacher_rope = config.rope_of(layer), config.rope_of_own(layer)
        self.is_owner = layer in config.owners
        self.suffix = "_swiftkv" if layer >= config.cut and config.is_swiftkv else ""
        self.is_blind = config.is_blind and layer >= config.cut
        self.qk_norm, self.has_gate = config.qk_norm, config.attention_gate
        self._add(config, self.suffix, self.is_owner)
        if with_teacher and self.suffix:
            self._add(config, "", True)
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.attention_sinks else None
        self.o_proj = nn.Linear(config.q_dim, config.hidden_size, config.output_bias)

    def _add(self, config: ModelConfig, suffix: str, with_kv: bool) -> None:
        rows = {"q": config.q_dim} | ({"k": config.kv_dim, "v": config.kv_dim} if with_kv else {})
        for part, size in rows.items():
            projected = 2 * size if part == "q" and self.has_gate else size
            self.add_module(f"{part}_proj{suffix}", nn.Linear(config.hidden_size, projected, config.qkv_bias))
            if config.qk_norm and part != "v":
                self.add_module(f"{part}_norm{suffix}", make_norm_of_heads(config, size // config.head_dim))

    def _heads(self, x: Tensor, part: str, teacher: bool) -> tuple[Tensor, Tensor | None]:
        """Return a projection's heads, and of q what the projection makes of their gates, where attention has some."""
        suffix, gates = "" if teacher else self.suffix, None
        heads = self.get_submodule(f"{part}_proj{suffix}")(x).unflatten(-1, self.head_shape)
        if part == "q" and self.has_gate:
            heads, gates = heads[..., 0::2, :], heads[..., 1::2, :]
        normed = self.get_submodule(f"{part}_norm{suffix}")(heads) if self.qk_norm and part != "v" else heads
        return normed, gates

    def cached(self, k: Tensor, v: Tensor) -> KV:
        """Return what the cache gives back for K and V; ModelOpt's subclass overrides it."""
        return k, v

    def key_value(self, x: Tensor, layout: Layout, teacher: bool = False) -> KV:
        """Return K and V of normalised ``x`` ``[B, T, hidden]``."""
        k = layout.rotate(self._heads(x, "k", teacher)[0], self.teacher_rope if teacher else self.rope)
        return self.cached(k, self._heads(x, "v", teacher)[0])

    def query(self, x: Tensor, layout: Layout, teacher: bool = False) -> Tensor:
        """Return rotated Q ``[B, T, heads, head_dim]`` of normalised ``x`` ``[B, T, hidden]``."""
        return self._query(x, layout, teacher)[0]

    def _query(self, x: Tensor, layout: Layout, teacher: bool) -> tuple[Tensor, Tensor | None]:
        """Return it, and what its projection makes of the heads' gates."""
        heads, gates = self._heads(x, "q", teacher)
        q = layout.rotate(heads, self.teacher_rope if teacher else self.rope)
        return (q if layout.growth is None else q * layout.growth[..., None].to(q.dtype)), gates

    def forward(self, x: Tensor, kv: KV, layout: Layout, teacher: bool = False) -> Tensor:
        """Attend from normalised ``x`` ``[B, T, hidden]`` to ``kv``; returns the same shape."""
        q, gates = self._query(x, layout, teacher)
        q = q.transpose(1, 2)
        repeats = q.shape[1] // kv[0].shape[2]
        k, v = (t.transpose(1, 2).repeat_interleave(repeats, dim=1).to(q.dtype) for t in kv)
        mask = layout.masks[BLIND if self.is_blind and not teacher else self.window]
        if self.sinks is not None:
            out = self._with_sinks(q, k, v, mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)
        out = out.transpose(1, 2)
        return self.o_proj((out if gates is None else out * gates.float().sigmoid().to(x.dtype)).flatten(2))

    def _with_sinks(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention ``[B, heads, T, head_dim]`` where each head has one key more, without a value, whose score is its
        sink."""
        assert self.sinks is not None
        scores = (q @ k.transpose(2, 3)).float() * self.scale
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        sinks = self.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat((scores.masked_fill(~mask, -torch.inf), sinks), dim=-1).softmax(-1)[..., :-1]
        return weights.to(v.dtype) @ v
