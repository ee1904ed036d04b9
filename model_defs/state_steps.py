"""What a packed step says to layers that keep a state, and the single input's part in those above a cut."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.config import ModelConfig
from model_defs.layers import Linear, RMSNorm
from model_defs.state_layers import StateLayers
from plugins.short_conv import short_conv


@dataclass(frozen=True)
class StateInputs:
    """What layers that keep a state need to know of the packed step: ``query_start`` int32 ``[S+1]``, and the rows that
    sequences go on from and that states go to, ``state_read`` int32 ``[S]`` and ``state_write`` int32 ``[T]``, as
    ``model_defs.state_layers`` says."""

    query_start: Tensor
    state_read: Tensor
    state_write: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """As operators on states take them."""
        return self.query_start, self.state_read, self.state_write


@dataclass(frozen=True)
class StateReads:
    """How R survivors read the states after them: each is a sequence of one token that writes nothing. Made once for
    all layers."""

    query_start: Tensor
    survivor_state: Tensor
    nowhere: Tensor
    no_steps: Tensor
    """float32 ``[R, gates]`` of a layer: by these a state neither forgets nor takes anything up"""

    @classmethod
    def of(cls, rows: Tensor, kind: StateLayers) -> "StateReads":
        """Return it for the survivors' ``rows`` int32 ``[R]``."""
        starts = torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device)
        no_steps = torch.full((rows.shape[0], kind.num_gates), -torch.inf, device=rows.device)
        return cls(starts, rows, torch.full_like(rows, -1), no_steps)

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """As operators on states take them."""
        return self.query_start, self.survivor_state, self.nowhere


class SingleInputStates(nn.Module):
    """The single input's part in the states of all layers above the cut: one GEMM for what they take up, and where
    there are gates one for these, never rounded to few bits."""

    def __init__(self, config: ModelConfig, kind: StateLayers) -> None:
        super().__init__()
        self.num_layers = len(config.upper_linear)
        channels, gates = (self.num_layers * rows for rows in kind.input_rows)
        self.states = Linear(config.hidden_size, channels, False)
        if gates:
            self.gates = Linear(config.hidden_size, gates, False, float32_out=True, quantizes=False)

    def forward(self, hidden: Tensor, norm: RMSNorm | None) -> list[tuple[Tensor, ...]]:
        """Return for each layer what is made of the hidden state entering the cut ``[T, hidden]``: ``[T, channels]``,
        and float32 ``[T, gates]`` where there are some."""
        parts = [self.states(hidden, norm).chunk(self.num_layers, -1)]
        if hasattr(self, "gates"):
            parts.append(self.gates(hidden, norm).chunk(self.num_layers, -1))
        return list(zip(*parts, strict=True))


class SharedConvolution(nn.Module):
    """A convolution above the cut, which both graphs have. Its pool keeps what the single input makes, for ``width``
    tokens, the last one's too; of the last ``own`` of its channels a survivor has its own in place of that."""

    def __init__(self, width: int, channels: int, own: int, bias: bool, activates: bool) -> None:
        super().__init__()
        self.own, self.activates = own, activates
        self.conv = nn.Parameter(torch.empty(width, 1, channels))
        self.conv_bias = nn.Parameter(torch.empty(channels)) if bias else None

    def keep(self, channels: Tensor, pool: Tensor, step: StateInputs) -> Tensor:
        """Bring the pool up to date by ``channels`` ``[T, channels]``; returns their convolution."""
        gains = F.pad(self.conv.squeeze(1), (0, 0, 1, 0))
        return short_conv(channels, gains, *step.rows, pool, self.activates, self.conv_bias)

    def read(self, own: Tensor, pool: Tensor, reads: StateReads) -> Tensor:
        """Return the convolution ``[R, channels]`` at survivors, with ``own`` ``[R, own]`` of theirs."""
        gains = self.conv.squeeze(1)
        others = gains.shape[1] - self.own
        earlier, last = gains[:-1], gains[-1:]
        kept, fresh = F.pad(last[:, :others], (0, self.own)), F.pad(last[:, others:], (others, 0))
        gains = torch.cat((earlier, kept, fresh))
        return short_conv(F.pad(own, (others, 0)), gains, *reads.rows, pool, self.activates, self.conv_bias)
