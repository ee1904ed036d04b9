"""Layers that keep a state in place of K and V: the teacher's projections below the cut, SwiftKV's or both above it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvforge.swiftkv.channel_decays import SwiftKVChannelDelta
from kvforge.swiftkv.recurrences import convolved, delta_ruled, scanned, unit
from kvforge.swiftkv.token_layout import Layout
from model_defs import ModelConfig
from model_defs.channel_delta import ChannelDelta
from model_defs.gated_conv import GatedConv
from model_defs.layers import RMSNorm
from model_defs.linear import LinearAttention
from model_defs.mamba2 import Mamba2


class SwiftKVStates(nn.Module):
    """The parameters of one layer. Above the cut those that make and read states end in ``_swiftkv``, and
    ``with_teacher`` adds those the layer had before; the others are of both."""

    own: dict[str, int]
    """Outputs of the projections of the layer's own input above the cut, by the ends of their names."""
    plain: dict[str, int]
    """The same of a layer below a cut."""

    def __init__(self, config: ModelConfig, layer: int, with_teacher: bool, has_conv_bias: bool) -> None:
        super().__init__()
        hidden, kind = config.hidden_size, config.linear
        assert kind is not None and not isinstance(kind, ChannelDelta)
        is_above = layer >= config.cut and config.is_swiftkv
        if is_above:
            made = {f"_{part}": rows for parts in kind.input_parts for part, rows in parts.items()}
            self._add(hidden, self.own | made, "_swiftkv", kind, has_conv_bias)
        if with_teacher or not is_above:
            self._add(hidden, self.plain, "", kind, has_conv_bias)
        self.out_proj = nn.Linear(kind.result_dim, hidden, False)

    def _add(
        self, hidden: int, rows: dict[str, int], suffix: str, kind: LinearAttention | Mamba2 | GatedConv, bias: bool
    ) -> None:
        for part, count in rows.items():
            self.add_module(f"in_proj{part}{suffix}", nn.Linear(hidden, count, False))
        channels = kind.row_shapes(bool(suffix))[0][1]
        conv = nn.Conv1d(channels, channels, kind.conv_width, groups=channels, bias=bias)
        self.add_module(f"conv1d{suffix}", conv)

    def project(self, x: Tensor, *parts: str) -> tuple[Tensor, ...]:
        """Return projections of ``x`` by the ends of their names."""
        return tuple(self.get_submodule(f"in_proj{part}")(x) for part in parts)

    def forward(self, x: Tensor, single_input: Tensor | None, layout: Layout) -> Tensor:
        """Normed ``x`` ``[B, T, hidden]`` to what the layer adds. Above a cut states are of the ``single_input`` ``[B,
        T, hidden]``; the layer runs as before the cut without one."""
        return self.out_proj(self.mixed(x, single_input, layout.positions))

    def mixed(self, x: Tensor, single_input: Tensor | None, positions: Tensor) -> Tensor:
        """Return ``[B, T, result]``."""
        raise NotImplementedError


class SwiftKVGatedConv(SwiftKVStates):
    """A gated short convolution."""

    def __init__(self, config: ModelConfig, layer: int, with_teacher: bool = False) -> None:
        assert isinstance(config.linear, GatedConv)
        self.own = self.plain = {"": 3 * config.linear.channels}
        super().__init__(config, layer, with_teacher, has_conv_bias=False)

    def mixed(self, x: Tensor, single_input: Tensor | None, positions: Tensor) -> Tensor:
        """See ``SwiftKVStates``."""
        if single_input is None:
            b, c, x = self.project(x, "")[0].chunk(3, -1)
            return c * convolved(b * x, self.conv1d.weight, positions)
        b, c, x = self.project(x, "_swiftkv")[0].chunk(3, -1)
        earlier_b, earlier_x = self.project(single_input, "_bx_swiftkv")[0].chunk(2, -1)
        return c * convolved(earlier_b * earlier_x, self.conv1d_swiftkv.weight, positions, own=b * x)


class SwiftKVMamba2(SwiftKVStates):
    """Mamba-2."""

    def __init__(self, config: ModelConfig, layer: int, with_teacher: bool = False) -> None:
        assert isinstance(config.linear, Mamba2)
        self.sizes = mamba = config.linear
        self.plain = {"": mamba.inner_dim + mamba.conv_channels + mamba.num_heads}
        self.own = {"_z": mamba.inner_dim, "_c": mamba.queries_dim}
        super().__init__(config, layer, with_teacher, has_conv_bias=True)
        for name in ("A_log", "dt_bias", "D"):
            self.register_parameter(name, nn.Parameter(torch.empty(mamba.num_heads)))
        self.norm = RMSNorm(mamba.inner_dim, config.rms_norm_eps)

    def mixed(self, x: Tensor, single_input: Tensor | None, positions: Tensor) -> Tensor:
        """See ``SwiftKVStates``."""
        sizes, own, conv = self.sizes, None, self.conv1d if single_input is None else self.conv1d_swiftkv
        if single_input is None:
            each = (sizes.inner_dim, sizes.conv_channels, sizes.num_heads)
            gate, channels, steps = self.project(x, "")[0].split(each, -1)
        else:
            gate, queries = self.project(x, "_z_swiftkv", "_c_swiftkv")
            channels, steps = self.project(single_input, "_xbc_swiftkv", "_dt_swiftkv")
            own = torch.cat((channels[..., : -sizes.queries_dim], queries), -1)
        xbc = F.silu(convolved(channels, conv.weight, positions, own) + conv.bias).float()
        values, b, c = xbc.split((sizes.inner_dim, sizes.queries_dim, sizes.queries_dim), -1)
        values, repeats = values.unflatten(-1, (sizes.num_heads, -1)), sizes.num_heads // sizes.num_groups
        b, c = (x.unflatten(-1, (sizes.num_groups, -1)).repeat_interleave(repeats, dim=2) for x in (b, c))
        steps = F.softplus(steps.float() + self.dt_bias)
        result = scanned(values, steps, -self.A_log.float().exp() * steps, b, c, positions)
        result = (result + self.D[:, None] * values).to(x.dtype).float().flatten(2) * F.silu(gate.float())
        groups = result.unflatten(-1, (sizes.num_groups, -1))
        return self.norm.weight * self.norm.normed(groups).flatten(2).to(x.dtype)


class SwiftKVLinearAttention(SwiftKVStates):
    """Linear attention with a gated delta rule, whose projections are stored part by part or key head by key head."""

    def __init__(self, config: ModelConfig, layer: int, with_teacher: bool = False) -> None:
        assert isinstance(config.linear, LinearAttention)
        self.sizes = linear = config.linear
        self.own = {"_q": linear.keys_dim, "_z": linear.values_dim}
        self.plain = {
            "_qkv": linear.conv_channels,
            "_z": linear.values_dim,
            **dict.fromkeys(("_b", "_a"), linear.num_value_heads),
        }
        if linear.by_key_head:
            self.plain = {"_qkvz": linear.conv_channels + linear.values_dim, "_ba": 2 * linear.num_value_heads}
        super().__init__(config, layer, with_teacher, has_conv_bias=False)
        for name in ("A_log", "dt_bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(linear.num_value_heads)))
        self.norm = RMSNorm(linear.value_dim, config.rms_norm_eps)

    def mixed(self, x: Tensor, single_input: Tensor | None, positions: Tensor) -> Tensor:
        """See ``SwiftKVStates``."""
        sizes, repeats = self.sizes, self.sizes.num_value_heads // self.sizes.num_key_heads
        if single_input is None:
            channels, gate, rates, steps = self._by_key_head(x) if sizes.by_key_head else self.project(x, *self.plain)
            qkv = F.silu(convolved(channels, self.conv1d.weight, positions))
        else:
            queries, gate = self.project(x, "_q_swiftkv", "_z_swiftkv")
            channels, rates, steps = self.project(single_input, "_kv_swiftkv", "_b_swiftkv", "_a_swiftkv")
            kv = F.silu(convolved(channels, self.conv1d_swiftkv.weight, positions))
            qkv = torch.cat((F.silu(queries), kv), -1)
        q, k, v = qkv.float().split((sizes.keys_dim, sizes.keys_dim, sizes.values_dim), -1)
        q, k = (unit(part.unflatten(-1, (-1, sizes.key_dim))).repeat_interleave(repeats, dim=2) for part in (q, k))
        decays = (-self.A_log.float().exp() * F.softplus(steps.float() + self.dt_bias)).exp()
        v = v.unflatten(-1, (-1, sizes.value_dim))
        result = delta_ruled(q * sizes.key_dim**-0.5, k, v, rates.float().sigmoid(), decays[..., None], positions)
        gate = F.silu(gate.unflatten(-1, (-1, sizes.value_dim)).float())
        return (self.norm(result.to(x.dtype)).float() * gate).to(x.dtype).flatten(2)

    def _by_key_head(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v side by side, gates, betas and steps, each with all key heads' parts side by side."""
        sizes, shares = self.sizes, self.sizes.num_value_heads // self.sizes.num_key_heads
        qkvz, ba = (part.unflatten(-1, (sizes.num_key_heads, -1)) for part in self.project(x, *self.plain))
        values = shares * sizes.value_dim
        q, k, v, z = (part.flatten(-2) for part in qkvz.split((sizes.key_dim, sizes.key_dim, values, values), -1))
        return torch.cat((q, k, v), -1), z, *(part.flatten(-2) for part in ba.split((shares, shares), -1))


STATES: dict[type, Callable[[ModelConfig, int, bool], SwiftKVStates | SwiftKVChannelDelta]] = {
    ChannelDelta: SwiftKVChannelDelta,
    GatedConv: SwiftKVGatedConv,
    LinearAttention: SwiftKVLinearAttention,
    Mamba2: SwiftKVMamba2,
}
