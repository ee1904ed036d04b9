"""Linear attention whose state forgets key channel by key channel (arXiv 2510.26692, section 3), as ``state_mixers``
has the other layers that keep a state."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvforge.swiftkv.recurrences import convolved, delta_ruled, unit
from kvforge.swiftkv.token_layout import Layout
from model_defs import ModelConfig
from model_defs.channel_delta import ChannelDelta
from model_defs.layers import RMSNorm


class SwiftKVChannelDelta(nn.Module):
    """The parameters of one layer. Above the cut those that make and read states end in ``_swiftkv``, and
    ``with_teacher`` adds those the layer had before; the others are of both."""

    def __init__(self, config: ModelConfig, layer: int, with_teacher: bool = False) -> None:
        super().__init__()
        assert isinstance(config.linear, ChannelDelta)
        self.sizes = kind = config.linear
        inner, rank = kind.decay_matrix
        rows = dict.fromkeys("qkv", inner) | {"b": kind.num_heads, "f_a": rank, "g_a": rank}
        is_above = layer >= config.cut and config.is_swiftkv
        self.suffix = "_swiftkv" if is_above else ""
        for suffix in dict.fromkeys((self.suffix, "") if with_teacher else (self.suffix,)):
            for part, count in rows.items():
                self.add_module(f"{part}_proj{suffix}", nn.Linear(config.hidden_size, count, False))
            for part in "kv" if suffix else "qkv":
                conv = nn.Conv1d(inner, inner, kind.conv_width, groups=inner, bias=False)
                self.add_module(f"{part}_conv1d{suffix}", conv)
        self.f_b_proj, self.g_b_proj = nn.Linear(rank, inner, False), nn.Linear(rank, inner, False)
        self.A_log = nn.Parameter(torch.empty(1, 1, kind.num_heads, 1))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.o_norm = RMSNorm(kind.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(kind.result_dim, config.hidden_size, False)

    def forward(self, x: Tensor, single_input: Tensor | None, layout: Layout) -> Tensor:
        """Normed ``x`` ``[B, T, hidden]`` to what the layer adds. Above a cut states are of the ``single_input`` ``[B,
        T, hidden]``; the layer runs as before the cut without one."""
        kind, suffix = self.sizes, "" if single_input is None else self.suffix
        source = x if single_input is None else single_input

        def project(part: str, of: Tensor) -> Tensor:
            return self.get_submodule(f"{part}_proj{suffix}")(of)

        def mixed(part: str) -> Tensor:
            gains = self.get_parameter(f"{part}_conv1d{suffix}.weight")
            return convolved(project(part, source), gains, layout.positions)

        queries = mixed("q") if single_input is None else project("q", x)
        q, k, v = (
            F.silu(each).float().unflatten(-1, (-1, kind.head_dim)) for each in (queries, mixed("k"), mixed("v"))
        )
        steps = F.softplus(self.f_b_proj(project("f_a", source)).float() + self.dt_bias.float())
        decays = (-self.A_log.float().exp() * steps.unflatten(-1, (-1, kind.head_dim))).exp()
        rates = project("b", source).float().sigmoid()
        result = delta_ruled(unit(q) * kind.head_dim**-0.5, unit(k), v, rates, decays, layout.positions).to(x.dtype)
        gate = self.g_b_proj(project("g_a", x)).view_as(result).float()
        normed = self.o_norm.normed(result) * self.o_norm.weight.float()
        return self.o_proj((normed * gate.sigmoid()).to(x.dtype).flatten(2))
