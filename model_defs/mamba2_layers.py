"""Layers of Mamba-2 (arXiv 2405.21060, section 7.1)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.config import ModelConfig
from model_defs.layers import Block, Linear, Pool, RMSNorm
from model_defs.mamba2 import Mamba2
from model_defs.state_steps import SharedConvolution, StateInputs, StateReads
from model_defs.weights import SCALAR_COPIES
from plugins.mamba2_scan import mamba2_scan
from plugins.short_conv import short_conv


class Mamba2Convolution(SharedConvolution):
    """The convolution of a layer above the cut: survivors have their own C."""

    def __init__(self, mamba: Mamba2) -> None:
        super().__init__(mamba.conv_width, mamba.conv_channels, own=mamba.queries_dim, bias=True, activates=True)


class Mamba2Update(Mamba2Convolution):
    """What brings the states of a layer above the cut up to date, in the lower graph."""

    def __init__(self, mamba: Mamba2) -> None:
        super().__init__(mamba)
        self.num_heads = mamba.num_heads
        for name in ("decay_log", "decay_bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(SCALAR_COPIES * mamba.num_heads)))

    def forward(self, channels: Tensor, steps: Tensor, pool: Pool, step: StateInputs) -> None:
        """Update ``pool`` by ``channels`` ``[T, channels]`` and ``steps`` float32 ``[T, heads]`` of the single
        input."""
        xb = self.keep(channels, pool[0], step)[:, : -self.own]
        decay_log, decay_bias = (x[: self.num_heads].float() for x in (self.decay_log, self.decay_bias))
        mamba2_scan(xb, steps, decay_log, decay_bias, torch.zeros_like(decay_log), *step.rows, pool[1], False)


class Mamba2Block(Block):
    """A layer of Mamba-2. Its projections are two: of the result's gate and the convolution's channels, and of each
    head's step, which are never rounded to few bits. Above the cut it has one, of the gate and C."""

    def add_projections(self, config: ModelConfig, layer: int) -> None:
        """Register what makes the state and reads it."""
        mamba = config.linear
        assert isinstance(mamba, Mamba2)
        self.num_state_heads, self.num_groups = mamba.num_heads, mamba.num_groups
        is_above = layer >= config.cut
        self.parts = (mamba.inner_dim, mamba.queries_dim if is_above else mamba.conv_channels)
        self.add_module("zc" if is_above else "zxbc", Linear(config.hidden_size, sum(self.parts), False))
        if is_above:
            self.state = Mamba2Convolution(mamba)
        else:
            self.steps = Linear(config.hidden_size, mamba.num_heads, False, float32_out=True, quantizes=False)
            self.conv = nn.Parameter(torch.empty(mamba.conv_width, 1, mamba.conv_channels))
            self.conv_bias = nn.Parameter(torch.empty(mamba.conv_channels))
        for name in ("skip",) if is_above else ("decay_log", "decay_bias", "skip"):
            self.register_parameter(name, nn.Parameter(torch.empty(SCALAR_COPIES * mamba.num_heads)))
        self.result_norm = RMSNorm(mamba.inner_dim, config.rms_norm_eps)

    def mix(self, hidden: Tensor, pool: Pool, step: StateInputs) -> Tensor:
        """Bring the states in the pool up to date and return the next residual stream ``[T, hidden]``."""
        gate, channels = self.zxbc(hidden, self.input_norm).split(self.parts, dim=-1)
        xbc = short_conv(channels, self.conv.squeeze(1), *step.rows, pool[0], bias=self.conv_bias)
        of_heads = (self.decay_log, self.decay_bias, self.skip)
        decay_log, decay_bias, skip = (x[: self.num_state_heads].float() for x in of_heads)
        mixed = mamba2_scan(xbc, self.steps(hidden, self.input_norm), decay_log, decay_bias, skip, *step.rows, pool[1])
        return self._finish(hidden, mixed, gate)

    def read(self, hidden: Tensor, pool: Pool, reads: StateReads) -> Tensor:
        """Return the next residual stream ``[R, hidden]`` of survivors, by the states after them in the pool."""
        gate, queries = self.zc(hidden, self.input_norm).split(self.parts, dim=-1)
        xbc = self.state.read(queries, pool[0], reads)
        skip = self.skip[: self.num_state_heads].float()
        none = torch.zeros_like(skip)
        mixed = mamba2_scan(xbc, reads.no_steps, none, none, skip, *reads.rows, pool[1])
        return self._finish(hidden, mixed, gate)

    def _finish(self, hidden: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
        gated = mixed.flatten(1).float() * F.silu(gate.float())
        normed = self.result_norm.normed(gated.unflatten(-1, (self.num_groups, -1))).flatten(1)
        return self.mlp(self.o(self.result_norm.weight * normed.to(hidden.dtype), residual=hidden))
