"""Layers with a gated short convolution in place of attention."""

import torch
from torch import Tensor, nn

from model_defs.config import ModelConfig
from model_defs.gated_conv import GatedConv
from model_defs.layers import Block, Linear, Pool
from model_defs.linear_layers import StateInputs
from plugins.short_conv import short_conv


class GatedConvBlock(Block):
    """A layer whose result is c * conv(b * x), of three projections of the stream."""

    def add_projections(self, config: ModelConfig, layer: int) -> None:
        """Register what makes the state and reads it."""
        assert isinstance(config.linear, GatedConv)
        channels = config.linear.channels
        self.bcx = Linear(config.hidden_size, 3 * channels, False)
        self.conv = nn.Parameter(torch.empty(config.linear.conv_width, 1, channels))

    def mix(self, hidden: Tensor, pool: Pool, step: StateInputs) -> Tensor:
        """Bring the states in the pool up to date and return the next residual stream ``[T, hidden]``."""
        b, c, x = self.bcx(hidden, self.input_norm).chunk(3, dim=-1)
        rows = (step.query_start, step.state_read, step.state_write)
        return self.mlp(self.o(c * short_conv(b * x, self.conv.squeeze(1), *rows, pool[0], False), residual=hidden))
