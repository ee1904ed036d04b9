"""Layers of models with linear attention: those that have it (Gated DeltaNet, arXiv 2412.06464, section 3), and those
whose attention has a gate at its end."""

from collections.abc import Sequence
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


class StateUpdate(nn.Module):
    """What brings a layer's states up to date: the convolution over ``channels``, with or without those of queries, and
    the decay of each value head."""

    def __init__(self, linear: LinearAttention, channels: int) -> None:
        super().__init__()
        self.num_heads, self.has_queries = linear.num_value_heads, channels == linear.conv_channels
        self.conv = nn.Parameter(torch.empty(linear.conv_width, 1, channels))
        self.decay_log = nn.Parameter(torch.empty(SCALAR_COPIES * linear.num_value_heads))
        self.decay_bias = nn.Parameter(torch.empty(SCALAR_COPIES * linear.num_value_heads))

    def forward(self, channels: Tensor, gates: Tensor, pool: Pool, step: StateInputs) -> Tensor:
        """Update ``pool`` by ``channels`` ``[T, channels]`` and ``gates`` float32 ``[T, 2 heads]``; returns what the
        states give the queries, ``[T, heads, value_dim]``, or no rows where there are none."""
        rows = (step.query_start, step.state_read, step.state_write)
        qkv = short_conv(channels, self.conv.squeeze(1), *rows, pool[0])
        decay_log, decay_bias = (x[: self.num_heads].float() for x in (self.decay_log, self.decay_bias))
        return gated_delta_rule(qkv, gates, decay_log, decay_bias, *rows, pool[1], self.has_queries)


@dataclass(frozen=True)
class StateReads:
    """How R survivors read the states after them: each is a sequence of one token that forgets nothing and takes
    nothing up. Made once for all layers."""

    query_start: Tensor
    rows: Tensor
    nowhere: Tensor
    gates: Tensor
    no_decay: Tensor

    @classmethod
    def of(cls, linear: LinearAttention, rows: Tensor) -> "StateReads":
        """Return it for the survivors' ``rows`` int32 ``[R]``."""
        heads, device = linear.num_value_heads, rows.device
        starts = torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=device)
        gates = torch.full((rows.shape[0], 2 * heads), -torch.inf, device=device)
        return cls(starts, rows, torch.full_like(rows, -1), gates, torch.zeros(heads, device=device))

    def read(self, queries: Tensor, states: Tensor) -> Tensor:
        """Return what ``states``, a layer's pool, give ``queries`` ``[R, keys]``: ``[R, heads, value_dim]``."""
        qkv = F.pad(queries, (0, queries.shape[1] + states.shape[1] * states.shape[3]))
        none = self.no_decay
        return gated_delta_rule(qkv, self.gates, none, none, self.query_start, self.rows, self.nowhere, states)


class SingleInputStates(nn.Module):
    """The single input's part in the states of all layers above the cut: one GEMM for the channels of their
    convolutions, one for the gates of their value heads, never rounded to few bits, and each layer's update."""

    def __init__(self, config: ModelConfig, linear: LinearAttention) -> None:
        super().__init__()
        layers = config.upper_linear
        self.states = Linear(config.hidden_size, len(layers) * linear.state_channels, False)
        rows = len(layers) * 2 * linear.num_value_heads
        self.gates = Linear(config.hidden_size, rows, False, float32_out=True, quantizes=False)
        self.updates = nn.ModuleDict({str(layer): StateUpdate(linear, linear.state_channels) for layer in layers})

    def forward(self, hidden: Tensor, norm: RMSNorm | None, pools: Sequence[Pool], step: StateInputs) -> None:
        """Bring the states above the cut up to date by the hidden state entering it; ``pools`` are those layers'."""
        channels = self.states(hidden, norm).chunk(len(self.updates), -1)
        gates = self.gates(hidden, norm).chunk(len(self.updates), -1)
        for update, *part in zip(self.updates.values(), channels, gates, pools, strict=True):
            update(*part, step)


class LinearBlock(Block):
    """A layer with linear attention. Its projections are two: of the convolution's channels and the gate of the result,
    and of each value head's two numbers, which are never rounded to few bits. Above the cut the first is of queries in
    place of channels, and the second is the single input's."""

    def add_projections(self, config: ModelConfig, layer: int) -> None:
        """Register what makes the state and reads it."""
        linear = config.linear
        assert isinstance(linear, LinearAttention)
        self.gate_shape, self.is_above = (linear.num_value_heads, linear.value_dim), layer >= config.cut
        self.parts = (linear.keys_dim if self.is_above else linear.conv_channels, linear.values_dim)
        self.add_module("qz" if self.is_above else "qkvz", Linear(config.hidden_size, sum(self.parts), False))
        if not self.is_above:
            heads = 2 * linear.num_value_heads
            self.ba = Linear(config.hidden_size, heads, False, float32_out=True, quantizes=False)
            self.state = StateUpdate(linear, linear.conv_channels)
        self.result_norm = RMSNorm(linear.value_dim, config.rms_norm_eps)

    def mix(self, hidden: Tensor, pool: Pool, step: StateInputs) -> Tensor:
        """Bring the states in the pool up to date and return the next residual stream ``[T, hidden]``."""
        channels, gate = self.qkvz(hidden, self.input_norm).split(self.parts, dim=-1)
        mixed = self.state(channels, self.ba(hidden, self.input_norm), pool, step)
        return self._finish(hidden, mixed, gate)

    def read(self, hidden: Tensor, states: Tensor, reads: StateReads) -> Tensor:
        """Return the next residual stream ``[R, hidden]`` of survivors, by the states after them in the pool."""
        queries, gate = self.qz(hidden, self.input_norm).split(self.parts, dim=-1)
        queries = F.silu(queries.float()).to(hidden.dtype)
        return self._finish(hidden, reads.read(queries, states), gate)

    def _finish(self, hidden: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
        gate = F.silu(gate.unflatten(-1, self.gate_shape).float())
        gated = (self.result_norm(mixed).float() * gate).to(hidden.dtype)
        return self.mlp(self.o(gated.flatten(1), residual=hidden))
