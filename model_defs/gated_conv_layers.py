"""Layers with a gated short convolution in place of attention."""

import torch
from torch import Tensor, nn

from model_defs.config import ModelConfig
from model_defs.gated_conv import GatedConv
from model_defs.layers import Block, Linear, Pool
from model_defs.state_steps import SharedConvolution, StateInputs, StateReads
from plugins.short_conv import short_conv


class ConvUpdate(SharedConvolution):
    """What brings the states of a layer above the cut up to date."""

    def __init__(self, kind: GatedConv) -> None:
        super().__init__(kind.conv_width, kind.channels, own=kind.channels, bias=False, activates=False)

    def forward(self, made: Tensor, pool: Pool, step: StateInputs) -> None:
        """Update ``pool`` by ``made`` ``[T, 2 channels]`` of the single input: b, then x."""
        b, x = made.chunk(2, dim=-1)
        self.keep(b * x, pool[0], step)


class GatedConvBlock(Block):
    """A layer whose result is c * conv(b * x), of three projections of the stream."""

    def add_projections(self, config: ModelConfig, layer: int) -> None:
        """Register what makes the state and reads it."""
        assert isinstance(config.linear, GatedConv)
        channels = config.linear.channels
        self.bcx = Linear(config.hidden_size, 3 * channels, False)
        if layer >= config.cut:
            self.state = ConvUpdate(config.linear)
        else:
            self.conv = nn.Parameter(torch.empty(config.linear.conv_width, 1, channels))

    def mix(self, hidden: Tensor, pool: Pool, step: StateInputs) -> Tensor:
        """Bring the states in the pool up to date and return the next residual stream ``[T, hidden]``."""
        b, c, x = self.bcx(hidden, self.input_norm).chunk(3, dim=-1)
        mixed = short_conv(b * x, self.conv.squeeze(1), *step.rows, pool[0], False)
        return self.mlp(self.o(c * mixed, residual=hidden))

    def read(self, hidden: Tensor, pool: Pool, reads: StateReads) -> Tensor:
        """Return the next residual stream ``[R, hidden]`` of survivors, by what the pool has of the tokens before."""
        b, c, x = self.bcx(hidden, self.input_norm).chunk(3, dim=-1)
        return self.mlp(self.o(c * self.state.read(b * x, pool[0], reads), residual=hidden))
