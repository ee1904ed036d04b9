"""Layers of Mamba-2 (arXiv 2405.21060, section 7.1)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.config import ModelConfig
from model_defs.layers import Block, Linear, Pool, RMSNorm
from model_defs.linear_layers import StateInputs
from model_defs.mamba2 import Mamba2
from model_defs.weights import SCALAR_COPIES
from plugins.mamba2_scan import mamba2_scan
from plugins.short_conv import short_conv


class Mamba2Block(Block):
    """A layer of Mamba-2. Its projections are two: of the result's gate and the convolution's channels, and of each
    head's step, which are never rounded to few bits."""

    def add_projections(self, config: ModelConfig, layer: int) -> None:
        """Register what makes the state and reads it."""
        mamba = config.linear
        assert isinstance(mamba, Mamba2)
        self.num_state_heads, self.num_groups = mamba.num_heads, mamba.num_groups
        self.parts = (mamba.inner_dim, mamba.conv_channels)
        self.zxbc = Linear(config.hidden_size, sum(self.parts), False)
        self.steps = Linear(config.hidden_size, mamba.num_heads, False, float32_out=True, quantizes=False)
        self.conv = nn.Parameter(torch.empty(mamba.conv_width, 1, mamba.conv_channels))
        self.conv_bias = nn.Parameter(torch.empty(mamba.conv_channels))
        for name in ("decay_log", "decay_bias", "skip"):
            self.register_parameter(name, nn.Parameter(torch.empty(SCALAR_COPIES * mamba.num_heads)))
        self.result_norm = RMSNorm(mamba.inner_dim, config.rms_norm_eps)

    def mix(self, hidden: Tensor, pool: Pool, step: StateInputs) -> Tensor:
        """Bring the states in the pool up to date and return the next residual stream ``[T, hidden]``."""
        gate, channels = self.zxbc(hidden, self.input_norm).split(self.parts, dim=-1)
        rows = (step.query_start, step.state_read, step.state_write)
        xbc = short_conv(channels, self.conv.squeeze(1), *rows, pool[0], bias=self.conv_bias)
        of_heads = (self.decay_log, self.decay_bias, self.skip)
        decay_log, decay_bias, skip = (x[: self.num_state_heads].float() for x in of_heads)
        mixed = mamba2_scan(xbc, self.steps(hidden, self.input_norm), decay_log, decay_bias, skip, *rows, pool[1])
        gated = mixed.flatten(1).float() * F.silu(gate.float())
        normed = self.result_norm.normed(gated.unflatten(-1, (self.num_groups, -1))).flatten(1)
        return self.mlp(self.o(self.result_norm.weight * normed.to(hidden.dtype), residual=hidden))
