"""Layers of linear attention whose state forgets key channel by key channel (Kimi Delta Attention, arXiv 2510.26692,
section 3)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.channel_delta import ChannelDelta
from model_defs.config import ModelConfig
from model_defs.layers import Block, Linear, Pool, RMSNorm
from model_defs.state_steps import StateInputs, StateReads
from model_defs.weights import SCALAR_COPIES
from plugins.gated_delta_rule import gated_delta_rule
from plugins.short_conv import short_conv


class ChannelDeltaUpdate(nn.Module):
    """What brings a layer's states up to date: the convolutions, above a cut without that of queries, and the second
    half of what makes decays, which is never rounded to few bits."""

    def __init__(self, kind: ChannelDelta, is_above: bool = True) -> None:
        super().__init__()
        self.num_heads, self.has_queries = kind.num_heads, not is_above
        self.conv = nn.Parameter(torch.empty(2 if is_above else 3, kind.conv_width, 1, kind.inner_dim))
        self.decay_log = nn.Parameter(torch.empty(SCALAR_COPIES, 1, kind.num_heads, 1))
        self.decay_bias = nn.Parameter(torch.empty(kind.inner_dim))
        outputs, inputs = kind.decay_matrix
        self.decays = Linear(inputs, outputs, False, float32_out=True, quantizes=False)

    def forward(self, channels: Tensor, gates: Tensor, pool: Pool, step: StateInputs) -> Tensor:
        """Update ``pool`` by ``channels`` ``[T, channels]`` and ``gates`` float32 ``[T, heads + head_dim]``: each
        head's rate, and what decays are made of; returns what the states give the queries, ``[T, heads, head_dim]``, or
        no rows where there are none."""
        conv = self.conv.squeeze(2).transpose(0, 1).flatten(1)
        mixed = short_conv(channels, conv, *step.rows, pool[0])
        rates, inner = gates.tensor_split((self.num_heads,), dim=-1)
        gates = torch.cat((rates, self.decays(inner.to(channels.dtype))), -1)
        of_heads = (self.decay_log[0].flatten().float(), self.decay_bias.float())
        return gated_delta_rule(mixed, gates, *of_heads, *step.rows, pool[1], self.has_queries)


class ChannelDeltaBlock(Block):
    """A layer with it. Its projections of the stream are two: of the convolution's channels and the first half of the
    result's gate, and of the rates and the first half of decays, which are never rounded to few bits. Above the cut the
    first is of queries in place of channels, and the second is the single input's."""

    def add_projections(self, config: ModelConfig, layer: int) -> None:
        """Register what makes the state and reads it."""
        kind = config.linear
        assert isinstance(kind, ChannelDelta)
        self.kind, is_above = kind, layer >= config.cut
        self.parts = (kind.rounded_rows(is_above) - kind.head_dim, kind.head_dim)
        self.add_module("qz" if is_above else "qkvz", Linear(config.hidden_size, sum(self.parts), False))
        if not is_above:
            rows = kind.exact_rows()
            self.ba = Linear(config.hidden_size, rows, False, float32_out=True, quantizes=False)
            self.state = ChannelDeltaUpdate(kind, False)
        outputs, inputs = kind.gate_matrix
        self.gates = Linear(inputs, outputs, False)
        self.result_norm = RMSNorm(kind.head_dim, config.rms_norm_eps)

    def mix(self, hidden: Tensor, pool: Pool, step: StateInputs) -> Tensor:
        """Bring the states in the pool up to date and return the next residual stream ``[T, hidden]``."""
        channels, inner = self.qkvz(hidden, self.input_norm).split(self.parts, dim=-1)
        mixed = self.state(channels, self.ba(hidden, self.input_norm), pool, step)
        return self._finish(hidden, mixed, inner)

    def read(self, hidden: Tensor, pool: Pool, reads: StateReads) -> Tensor:
        """Return the next residual stream ``[R, hidden]`` of survivors, by the states after them in the pool."""
        queries, inner = self.qz(hidden, self.input_norm).split(self.parts, dim=-1)
        qkv = F.pad(F.silu(queries.float()).to(hidden.dtype), (0, 2 * self.kind.inner_dim))
        log, bias = (torch.zeros(n, device=hidden.device) for n in (self.kind.num_heads, self.kind.inner_dim))
        read = gated_delta_rule(qkv, reads.no_steps, log, bias, *reads.rows, pool[0])
        return self._finish(hidden, read, inner)

    def _finish(self, hidden: Tensor, mixed: Tensor, inner: Tensor) -> Tensor:
        gate = self.gates(inner.contiguous()).view_as(mixed)
        normed = self.result_norm.normed(mixed) * self.result_norm.weight.float()
        gated = (normed * torch.sigmoid(gate.float())).to(hidden.dtype)
        return self.mlp(self.o(gated.flatten(1), residual=hidden))
