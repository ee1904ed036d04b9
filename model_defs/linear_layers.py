"""Layers of models with linear attention: those that have it (Gated DeltaNet, arXiv 2412.06464, section 3), and those
whose attention has a gate at its end."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.config import ModelConfig
from model_defs.layers import Block, KVScales, Linear, Pool, RMSNorm, StepInputs
from model_defs.linear import DeltaRule, LinearAttention
from model_defs.state_steps import StateInputs, StateReads
from model_defs.weights import SCALAR_COPIES
from plugins.gated_delta_rule import gated_delta_rule
from plugins.short_conv import short_conv


class GatedBlock(Block):
    """A layer whose attention's result is multiplied by the sigmoid of a gate, head by head. The projection of q makes
    both: of each head first q, then the gate."""

    def queries(self, projected: Tensor) -> Tensor:
        """Return q and gates ``[T, heads, 2 d]``, q not normed."""
        return projected.unflatten(-1, (self.num_heads, 2 * self.head_dim))

    def attended(self, q: Tensor, pool: Pool, step: StepInputs, kv_scales: KVScales) -> tuple[Tensor, Pool]:
        """Return ``[T, heads, d]`` of what ``queries`` gives, and the pool that was read."""
        q, gate = q.chunk(2, dim=-1)
        attended, pool = super().attended(self.q_norm(q), pool, step, kv_scales)
        return (attended.float() * torch.sigmoid(gate.float())).to(attended.dtype), pool


class StateUpdate(nn.Module):
    """What brings a layer's states up to date: the convolution, above a cut without the channels of queries, and the
    decay of each value head."""

    def __init__(self, linear: LinearAttention, is_above: bool = True) -> None:
        super().__init__()
        channels = linear.row_shapes(is_above)[0][1]
        self.num_heads, self.has_queries = linear.num_value_heads, not is_above
        self.conv = nn.Parameter(torch.empty(linear.conv_width, 1, channels))
        self.decay_log = nn.Parameter(torch.empty(SCALAR_COPIES * linear.num_value_heads))
        self.decay_bias = nn.Parameter(torch.empty(SCALAR_COPIES * linear.num_value_heads))

    def forward(self, channels: Tensor, gates: Tensor, pool: Pool, step: StateInputs) -> Tensor:
        """Update ``pool`` by ``channels`` ``[T, channels]`` and ``gates`` float32 ``[T, 2 heads]``; returns what the
        states give the queries, ``[T, heads, value_dim]``, or no rows where there are none."""
        qkv = short_conv(channels, self.conv.squeeze(1), *step.rows, pool[0])
        decay_log, decay_bias = (x[: self.num_heads].float() for x in (self.decay_log, self.decay_bias))
        return gated_delta_rule(qkv, gates, decay_log, decay_bias, *step.rows, pool[1], self.has_queries)


class DeltaRuleBlock(Block):
    """A layer with a delta rule. Its projections of the stream are two: of the convolution's channels and what makes
    the gate of the result, and of what makes rates and decays, which are never rounded to few bits. Above the cut the
    first is of queries in place of channels, and the second is the single input's."""

    update: type[nn.Module]

    def add_projections(self, config: ModelConfig, layer: int) -> None:
        """Register what makes the state and reads it."""
        kind = config.linear
        assert isinstance(kind, DeltaRule)
        self.kind, is_above = kind, layer >= config.cut
        self.parts = (kind.rounded_rows(is_above) - kind.gate_rows, kind.gate_rows)
        self.add_module("qz" if is_above else "qkvz", Linear(config.hidden_size, sum(self.parts), False))
        if not is_above:
            rows = kind.exact_rows()
            self.ba = Linear(config.hidden_size, rows, False, float32_out=True, quantizes=False)
            self.state = self.update(kind, False)
        self.result_norm = RMSNorm(kind.state_shape[2], config.rms_norm_eps)

    def mix(self, hidden: Tensor, pool: Pool, step: StateInputs) -> Tensor:
        """Bring the states in the pool up to date and return the next residual stream ``[T, hidden]``."""
        channels, gate = self.qkvz(hidden, self.input_norm).split(self.parts, dim=-1)
        mixed = self.state(channels, self.ba(hidden, self.input_norm), pool, step)
        return self._finish(hidden, mixed, gate)

    def read(self, hidden: Tensor, pool: Pool, reads: StateReads) -> Tensor:
        """Return the next residual stream ``[R, hidden]`` of survivors, by the states after them in the pool."""
        queries, gate = self.qz(hidden, self.input_norm).split(self.parts, dim=-1)
        qkv = F.pad(F.silu(queries.float()).to(hidden.dtype), (0, self.kind.state_channels))
        heads = self.kind.state_shape[0]
        log, bias = (torch.zeros(n, device=hidden.device) for n in (heads, self.kind.num_gates - heads))
        read = gated_delta_rule(qkv, reads.no_steps, log, bias, *reads.rows, pool[0])
        return self._finish(hidden, read, gate)

    def _finish(self, hidden: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
        return self.mlp(self.o(self.gated(mixed, gate).to(hidden.dtype).flatten(1), residual=hidden))

    def gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Return ``mixed`` ``[T, heads, value_dim]``, normed and gated, in float32; ``gate`` ``[T, rows]`` is of the
        stream's projection."""
        raise NotImplementedError


class LinearBlock(DeltaRuleBlock):
    """A layer of Gated DeltaNet, whose gate the stream's projection makes."""

    update = StateUpdate

    def gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Return the normed result times the gate's SiLU."""
        return self.result_norm(mixed).float() * F.silu(gate.unflatten(-1, mixed.shape[1:]).float())
