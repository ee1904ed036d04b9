"""Layers with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), which attend to rows as they
are cached.

``W_UK`` of a head goes to its query instead of the keys, ``W_UV`` to its result instead of the values: what is computed
is the same, and a step reads one row of each token for all heads.
"""

import torch
from torch import Tensor, nn

from model_defs.config import ModelConfig
from model_defs.latent import LATENT_EPS, LatentAttention
from model_defs.layers import Block, ExpertLinear, KVScales, Linear, Pool, RMSNorm, StepInputs
from model_defs.rope import apply_rope
from plugins.paged_attention import paged_attention


class LatentRows(nn.Module):
    """The norm of an owner's latents, and its rows."""

    def __init__(self, latent: LatentAttention) -> None:
        super().__init__()
        self.rank = latent.rank
        self.norm = RMSNorm(latent.rank, LATENT_EPS)

    def forward(self, projected: Tensor) -> Tensor:
        """Return ``[T, 1, width]``, not rotated, of what an owner's projection gives, ``[T, width]``."""
        latent, shared_key = projected.tensor_split((self.rank,), dim=-1)
        return torch.cat((self.norm(latent), shared_key), dim=-1)[:, None]


class HeadsOfLatent(nn.Module):
    """An owner's ``W_UK`` and ``W_UV``, a matrix for each head, which all layers that read its cache have."""

    def __init__(self, config: ModelConfig, latent: LatentAttention) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.absorb = ExpertLinear(config.num_heads, latent.nope_dim, latent.rank)
        self.expand = ExpertLinear(config.num_heads, latent.rank, latent.value_dim)

    def numbers(self, rows: Tensor) -> Tensor:
        """Return the heads' numbers for each token, int32 ``[T, heads]``."""
        heads = torch.arange(self.num_heads, dtype=torch.int32, device=rows.device)
        return heads.expand(rows.shape[0], self.num_heads)

    def to_rows(self, queries: Tensor) -> Tensor:
        """Return ``[T, heads, rank]`` of queries without rotation, ``[T, heads, nope_dim]``."""
        return self.absorb(queries, self.numbers(queries))

    def to_values(self, attended: Tensor) -> Tensor:
        """Return ``[T, heads, value_dim]`` of sums of latents, ``[T, heads, rank]``."""
        return self.expand(attended, self.numbers(attended))


class LatentBlock(Block):
    """A layer that attends to latents; the matrices of its heads are its owner's."""

    def add_projections(self, config: ModelConfig, layer: int) -> None:
        latent = config.latent
        assert latent is not None
        hidden, q_dim, self.latent = config.hidden_size, config.q_dim_of(layer), latent
        own = latent.width if self.has_own_kv else 0
        first = q_dim if latent.query_rank is None else latent.query_rank
        self.parts = (first, own)
        self.add_module("qkv" if self.has_own_kv else "q", Linear(hidden, first + own, False))
        if latent.query_rank is not None:
            self.query_norm = RMSNorm(latent.query_rank, LATENT_EPS)
            self.query = Linear(latent.query_rank, q_dim, False)
        if self.has_own_kv:
            self.rows = LatentRows(latent)
        self.owner: list[LatentBlock] = []  # in a list, so that its parameters are not this layer's too
        if layer in config.owners:
            self.of_heads = HeadsOfLatent(config, latent)

    def project_qkv(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return q ``[T, heads, query_dim]`` and rows ``[T, 1, width]``, neither rotated."""
        queries, rows = self.qkv(hidden, self.input_norm).split(self.parts, dim=-1)
        return self.queries(queries), self.rows(rows)

    def queries(self, projected: Tensor) -> Tensor:
        """Return q ``[T, heads, query_dim]``, not rotated, of what the first projection gives."""
        if self.latent.query_rank is not None:
            projected = self.query(projected.contiguous(), self.query_norm)
        return projected.unflatten(-1, (self.num_heads, self.latent.query_dim))

    def attended(self, q: Tensor, pool: Pool, step: StepInputs, kv_scales: KVScales) -> tuple[Tensor, Pool]:
        """Return ``[T, heads, value_dim]`` of q ``[T, heads, query_dim]``, not rotated, and the pool."""
        of_heads = self.owner[0].of_heads if self.owner else self.of_heads
        unrotated, rotated = q.tensor_split((self.latent.nope_dim,), dim=-1)
        rotated = apply_rope(rotated, step.cos, step.sin)
        rows = torch.cat((of_heads.to_rows(unrotated), rotated), dim=-1)
        scales = pool[1] if len(pool) > 1 else None
        pages = (step.query_start, step.kv_length, step.page_table)
        # The values are the rows too, of which the part that rotates is left behind.
        sums = paged_attention(rows, pool[0], pool[0], *pages, self.scale, self.window, scales, scales)
        return of_heads.to_values(sums[:, :, : self.latent.rank]), pool


class LatentInput(nn.Module):
    """SwiftKV's rows of every owner above the cut, from the one hidden state entering the cut layer: one shared norm,
    one GEMM ``[owners * width, hidden]``, and each owner's norm (``graphs.SingleInputKV`` for latents)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.latent is not None
        self.norm = RMSNorm(config.hidden_size, config.stream_eps)
        self.kv = Linear(config.hidden_size, len(config.upper_owners) * config.latent.width, False)
        self.num_owners = len(config.upper_owners)

    def forward(self, hidden: Tensor) -> list[tuple[Tensor, ...]]:
        """Return each owner's ``[T, width]``, which ``LatentRows`` makes its rows of."""
        return [(part,) for part in self.kv(hidden, self.norm).chunk(self.num_owners, dim=-1)]
