"""Layers of linear attention whose state forgets key channel by key channel (Kimi Delta Attention, arXiv 2510.26692,
section 3)."""

import torch
from torch import Tensor, nn

from model_defs.channel_delta import ChannelDelta
from model_defs.config import ModelConfig
from model_defs.layers import Linear, Pool
from model_defs.linear_layers import DeltaRuleBlock
from model_defs.state_steps import StateInputs
from model_defs.weights import SCALAR_COPIES
from plugins.gated_delta_rule import gated_delta_rule
from plugins.short_conv import short_conv


class ChannelDeltaUpdate(nn.Module):
    """What brings a layer's states up to date: the convolutions, above a cut without that of queries, and the second
    half of what makes decays, which is never rounded to few bits."""

    def __init__(self, kind: ChannelDelta, is_above: bool = True) -> None:
        super().__init__()
        self.num_heads, self.has_queries = kind.num_heads, not is_above
        self.conv = nn.Parameter(torch.empty(2 if is_above else 3, kind.conv_width, 1, kind.keys_dim))
        self.decay_log = nn.Parameter(torch.empty(SCALAR_COPIES, 1, kind.num_heads, 1))
        self.decay_bias = nn.Parameter(torch.empty(kind.keys_dim))
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


class ChannelDeltaBlock(DeltaRuleBlock):
    """A layer with it, whose gate has a second half behind the stream's projection."""

    update = ChannelDeltaUpdate

    def add_projections(self, config: ModelConfig, layer: int) -> None:
        """Register what makes the state and reads it."""
        super().add_projections(config, layer)
        outputs, inputs = self.kind.gate_matrix
        self.gates = Linear(inputs, outputs, False)

    def gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Return the normed result, scaled in float32, times the gate's sigmoid."""
        gate = self.gates(gate.contiguous()).view_as(mixed)
        return self.result_norm.normed(mixed) * self.result_norm.weight.float() * torch.sigmoid(gate.float())
