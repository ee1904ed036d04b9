"""Latent attention of one layer (DeepSeek-V2, arXiv 2405.04434, section 2.1), with keys and values expanded."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvforge.swiftkv.attention import KV
from kvforge.swiftkv.token_layout import Layout
from model_defs import ModelConfig
from model_defs.latent import LATENT_EPS
from model_defs.layers import RMSNorm


class SwiftKVLatentAttention(nn.Module):
    """The projections of one layer, as ``SwiftKVAttention`` has them. Layers of a group read the keys and values that
    are made of the owner's latents by the owner's ``kv_b_proj_swiftkv``."""

    def __init__(self, config: ModelConfig, layer: int, with_teacher: bool = False) -> None:
        super().__init__()
        assert config.latent is not None
        self.latent, self.num_heads = config.latent, config.num_heads
        self.scale, self.rope = config.score_scale(layer), config.rope_of(layer)
        self.window = config.layer_windows[layer]
        self.suffix = "_swiftkv" if layer >= config.cut else ""
        self._add(config, self.suffix, layer in config.owners)
        if with_teacher and self.suffix:
            self._add(config, "", True)
        self.o_proj = nn.Linear(config.attended_dim_of(layer), config.hidden_size, config.output_bias)

    def _add(self, config: ModelConfig, suffix: str, with_kv: bool) -> None:
        latent, hidden, q_dim = self.latent, config.hidden_size, self.num_heads * self.latent.query_dim
        if latent.query_rank is None:
            self.add_module(f"q_proj{suffix}", nn.Linear(hidden, q_dim, False))
        else:
            self.add_module(f"q_a_proj{suffix}", nn.Linear(hidden, latent.query_rank, False))
            self.add_module(f"q_a_layernorm{suffix}", RMSNorm(latent.query_rank, LATENT_EPS))
            self.add_module(f"q_b_proj{suffix}", nn.Linear(latent.query_rank, q_dim, False))
        if with_kv:
            expanded = self.num_heads * latent.expanded_dim
            self.add_module(f"kv_a_proj_with_mqa{suffix}", nn.Linear(hidden, latent.width, False))
            self.add_module(f"kv_a_layernorm{suffix}", RMSNorm(latent.rank, LATENT_EPS))
            self.add_module(f"kv_b_proj{suffix}", nn.Linear(latent.rank, expanded, False))

    def _apply_all(self, x: Tensor, names: tuple[str, ...], teacher: bool) -> Tensor:
        for name in names:
            x = self.get_submodule(name + ("" if teacher else self.suffix))(x)
        return x

    def key_value(self, x: Tensor, layout: Layout, teacher: bool = False) -> KV:
        """Return K ``[B, T, heads, d]`` and V ``[B, T, heads, v]`` of normalised ``x`` ``[B, T, hidden]``."""
        latent = self.latent
        rows = self._apply_all(x, ("kv_a_proj_with_mqa",), teacher)
        compressed, shared = rows.split((latent.rank, latent.rope_dim), -1)
        heads = self._apply_all(compressed, ("kv_a_layernorm", "kv_b_proj"), teacher)
        keys, values = heads.unflatten(-1, (self.num_heads, -1)).split((latent.nope_dim, latent.value_dim), -1)
        shared = layout.rotate(shared.unsqueeze(-2), self.rope).expand(-1, -1, self.num_heads, -1)
        return torch.cat((keys, shared), -1), values

    def forward(self, x: Tensor, kv: KV, layout: Layout, teacher: bool = False) -> Tensor:
        """Attend from normalised ``x`` ``[B, T, hidden]`` to ``kv``; returns the same shape."""
        latent = self.latent
        names = ("q_proj",) if latent.query_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")
        q = self._apply_all(x, names, teacher).unflatten(-1, (self.num_heads, -1))
        unrotated, rotated = q.split((latent.nope_dim, latent.rope_dim), -1)
        q = torch.cat((unrotated, layout.rotate(rotated, self.rope)), -1).transpose(1, 2)
        k, v = (t.transpose(1, 2).to(q.dtype) for t in kv)
        mask = layout.masks[self.window]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)
        return self.o_proj(out.transpose(1, 2).flatten(2))
