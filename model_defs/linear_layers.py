"""Layers of models with linear attention: those that have it (Gated DeltaNet, arXiv 2412.06464, section 3), and those
whose attention has a gate at its end."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.config import ModelConfig
from model_defs.layers import Block, KVScales, Linear, Pool, RMSNorm, StepInputs
from model_defs.linear import LinearAttention
from model_defs.weights import SCALAR_COPIES
from plugins.gated_delta_rule import gated_delta_rule
from plugins.short_conv import short_conv


@dataclass(frozen=True)
class StateInputs:
    """What layers that keep a state need to know of the packed step: ``query_start`` int32 ``[S+1]``, and the rows that
    sequences go on from and that states go to, ``state_read`` int32 ``[S]`` and ``state_write`` int32 ``[T]``, as
    ``model_defs.state_layers`` says."""

    query_start: Tensor
    state_read: Tensor
    state_write: Tensor


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


class LinearBlock(Block):
    """A layer with linear attention. Its projections are two: of the convolution's channels and the gate of the result,
    and of each value head's two numbers, which are never rounded to few bits."""

    def add_projections(self, config: ModelConfig, layer: int) -> None:
        """Register what makes the state and reads it."""
        linear = config.linear
        assert isinstance(linear, LinearAttention)
        self.linear: LinearAttention = linear
        self.parts = (linear.conv_channels, linear.values_dim)
        self.qkvz = Linear(config.hidden_size, sum(self.parts), False)
        self.ba = Linear(config.hidden_size, 2 * linear.num_value_heads, False, float32_out=True, quantizes=False)
        self.conv = nn.Parameter(torch.empty(linear.conv_width, 1, linear.conv_channels))
        self.decay_log = nn.Parameter(torch.empty(SCALAR_COPIES * linear.num_value_heads))
        self.decay_bias = nn.Parameter(torch.empty(SCALAR_COPIES * linear.num_value_heads))
        self.result_norm = RMSNorm(linear.value_dim, config.rms_norm_eps)

    def mix(self, hidden: Tensor, pool: Pool, step: StateInputs) -> Tensor:
        """Bring the states in the pool up to date and return the next residual stream ``[T, hidden]``."""
        channels, gate = self.qkvz(hidden, self.input_norm).split(self.parts, dim=-1)
        rows = (step.query_start, step.state_read, step.state_write)
        qkv = short_conv(channels, self.conv.squeeze(1), *rows, pool[0])
        heads = self.linear.num_value_heads
        decay_log, decay_bias = (x[:heads].float() for x in (self.decay_log, self.decay_bias))
        mixed = gated_delta_rule(qkv, self.ba(hidden, self.input_norm), decay_log, decay_bias, *rows, pool[1])
        gate = F.silu(gate.unflatten(-1, (heads, self.linear.value_dim)).float())
        gated = (self.result_norm(mixed).float() * gate).to(hidden.dtype)
        return self.mlp(self.o(gated.flatten(1), residual=hidden))
