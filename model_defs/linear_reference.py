"""Layers that keep a state in plain torch, as ``model_defs.reference`` takes them: one sequence, with linear attention
token by token (Gated DeltaNet, arXiv 2412.06464, and Kimi Delta Attention, arXiv 2510.26692, section 3 of both), and
Mamba-2 (arXiv 2405.21060, section 7.1)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from model_defs.channel_delta import ChannelDelta
from model_defs.linear import LinearAttention
from model_defs.mamba2 import Mamba2


def linear_attention(
    linear: LinearAttention,
    project: Callable[[Tensor, str], Tensor],
    weights: Mapping[str, Tensor],
    x: Tensor,
    name: str,
    eps: float,
    single_input: Tensor | None = None,
) -> Tensor:
    """Return what a layer's linear attention gives its output projection, ``[n, values]``, of normed ``x`` ``[n,
    hidden]``; states are in the dtype of the model, or in float32 where that is wider. Above a cut they are made of the
    ``single_input`` ``[n, hidden]``, and queries have no convolution."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if single_input is None:
        channels, gate, rate, step = _projected(linear, project, x, name)
        mixed = F.silu(_convolved(channels, weights[f"{name}.conv1d.weight"]))
    else:
        queries, gate = (project(x, f"{name}.in_proj_{part}_swiftkv") for part in "qz")
        channels, rate, step = (project(single_input, f"{name}.in_proj_{part}_swiftkv") for part in ("kv", "b", "a"))
        kv, gate = (
            F.silu(_convolved(channels, weights[f"{name}.conv1d_swiftkv.weight"])),
            gate.unflatten(-1, (-1, linear.value_dim)),
        )
        mixed = torch.cat((F.silu(queries), kv), -1)
    keys, repeats = linear.keys_dim, linear.num_value_heads // linear.num_key_heads
    q, k, v = mixed.to(wide).split((keys, keys, linear.values_dim), -1)
    q, k = (_unit(part.unflatten(-1, (-1, linear.key_dim))).repeat_interleave(repeats, dim=1) for part in (q, k))
    v = v.unflatten(-1, (-1, linear.value_dim))
    rate, step = rate.to(wide).sigmoid(), step.to(wide) + weights[f"{name}.dt_bias"].to(wide)
    decay = (-weights[f"{name}.A_log"].to(wide).exp() * F.softplus(step)).exp()
    result = _delta_ruled(q, k, v, rate, decay[..., None]).to(x.dtype).to(wide)
    normed = result / (result.square().mean(-1, keepdim=True) + eps).sqrt()
    normed = weights[f"{name}.norm.weight"] * normed.to(x.dtype)
    return (normed * F.silu(gate.to(wide))).to(x.dtype).flatten(1)


def channel_delta(
    kind: ChannelDelta,
    project: Callable[[Tensor, str], Tensor],
    weights: Mapping[str, Tensor],
    x: Tensor,
    name: str,
    eps: float,
    single_input: Tensor | None = None,
) -> Tensor:
    """The same where each key channel has a decay."""
    wide, suffix = torch.promote_types(x.dtype, torch.float32), "" if single_input is None else "_swiftkv"
    source = x if single_input is None else single_input

    def convolved(part: str) -> Tensor:
        return F.silu(_convolved(project(source, f"{name}.{part}_proj{suffix}"), weights[conv.format(part)]))

    conv = f"{name}.{{}}_conv1d{suffix}.weight"
    queries = convolved("q") if single_input is None else F.silu(project(x, f"{name}.q_proj{suffix}"))
    q, k, v = (part.to(wide).unflatten(-1, (-1, kind.head_dim)) for part in (queries, convolved("k"), convolved("v")))
    q, k = _unit(q), _unit(k)
    step = project(project(source, f"{name}.f_a_proj{suffix}"), f"{name}.f_b_proj").to(wide)
    step = F.softplus(step + weights[f"{name}.dt_bias"].to(wide)).unflatten(-1, (-1, kind.head_dim))
    decay = (-weights[f"{name}.A_log"].to(wide).exp().view(-1, 1) * step).exp()
    rate = project(source, f"{name}.b_proj{suffix}").to(wide).sigmoid()
    result = _delta_ruled(q, k, v, rate, decay).to(x.dtype).to(wide)
    gate = project(project(x, f"{name}.g_a_proj{suffix}"), f"{name}.g_b_proj").view_as(result).to(wide)
    normed = result / (result.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.o_norm.weight"].to(wide)
    return (normed * gate.sigmoid()).to(x.dtype).flatten(1)


def gated_conv(
    project: Callable[[Tensor, str], Tensor],
    weights: Mapping[str, Tensor],
    x: Tensor,
    name: str,
    single_input: Tensor | None = None,
) -> Tensor:
    """Return what a layer's gated convolution gives its output projection, ``[n, channels]``, of normed ``x`` ``[n,
    hidden]``. Above a cut the tokens before each are of the ``single_input`` ``[n, hidden]``."""
    if single_input is None:
        b, c, x = project(x, f"{name}.in_proj").chunk(3, dim=-1)
        return c * _convolved(b * x, weights[f"{name}.conv1d.weight"])
    b, c, x = project(x, f"{name}.in_proj_swiftkv").chunk(3, dim=-1)
    earlier_b, earlier_x = project(single_input, f"{name}.in_proj_bx_swiftkv").chunk(2, dim=-1)
    return c * _convolved(earlier_b * earlier_x, weights[f"{name}.conv1d_swiftkv.weight"], own=b * x)


def mamba2(
    mamba: Mamba2,
    project: Callable[[Tensor, str], Tensor],
    weights: Mapping[str, Tensor],
    x: Tensor,
    name: str,
    eps: float,
    single_input: Tensor | None = None,
) -> Tensor:
    """Return what a layer of Mamba-2 gives its output projection, ``[n, inner]``, of normed ``x`` ``[n, hidden]``;
    states are in the dtype of the model, or in float32 where that is wider. Above a cut x, B and steps are made of the
    ``single_input`` ``[n, hidden]``, and in the convolution of C the tokens before each."""
    wide, heads, inner = torch.promote_types(x.dtype, torch.float32), mamba.num_heads, mamba.inner_dim
    if single_input is None:
        gate, channels, raw = project(x, f"{name}.in_proj").split((inner, mamba.conv_channels, heads), -1)
        convolved = _convolved(channels, weights[f"{name}.conv1d.weight"]) + weights[f"{name}.conv1d.bias"]
    else:
        gate, queries = (project(x, f"{name}.in_proj_{part}_swiftkv") for part in "zc")
        channels, raw = (project(single_input, f"{name}.in_proj_{part}_swiftkv") for part in ("xbc", "dt"))
        own = torch.cat((channels[:, : -queries.shape[1]], queries), -1)
        gains, bias = (weights[f"{name}.conv1d_swiftkv.{part}"] for part in ("weight", "bias"))
        convolved = _convolved(channels, gains, own) + bias
    mixed = F.silu(convolved)
    values, *keys = mixed.to(wide).split((inner, *[mamba.num_groups * mamba.state_dim] * 2), -1)
    values = values.unflatten(-1, (heads, mamba.head_dim))
    repeats = heads // mamba.num_groups
    b, c = (each.unflatten(-1, (-1, mamba.state_dim)).repeat_interleave(repeats, dim=1) for each in keys)
    decay_log, bias, skip = (weights[f"{name}.{part}"].to(wide) for part in ("A_log", "dt_bias", "D"))
    step = F.softplus(raw.to(wide) + bias)
    decay = (-decay_log.exp() * step).exp()
    state = values.new_zeros(heads, mamba.head_dim, mamba.state_dim)
    results = []
    for t in range(len(x)):
        state = decay[t, :, None, None] * state + (step[t, :, None] * values[t])[:, :, None] * b[t, :, None]
        results.append((state * c[t, :, None]).sum(-1) + skip[:, None] * values[t])
    result = torch.stack(results).to(x.dtype).to(wide).flatten(1) * F.silu(gate.to(wide))
    groups = result.unflatten(-1, (mamba.num_groups, -1))
    normed = (groups / (groups.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(1)
    return weights[f"{name}.norm.weight"] * normed.to(x.dtype)


def _unit(heads: Tensor) -> Tensor:
    """Queries or keys ``[n, heads, d]`` of length 1."""
    return heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _delta_ruled(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, decay: Tensor) -> Tensor:
    """What states give q ``[n, heads, key_dim]``, where k and v take part by ``rate`` ``[n, heads]``, and rows are
    multiplied by ``decay`` ``[n, heads, key_dim or 1]`` before."""
    state = v.new_zeros(*k.shape[1:], v.shape[-1])
    results = []
    for t in range(len(q)):
        state = decay[t, :, :, None] * state
        missing = v[t] - (state * k[t, :, :, None]).sum(1)
        state = state + k[t, :, :, None] * (rate[t, :, None] * missing)[:, None]
        results.append((state * q[t, :, :, None]).sum(1) * q.shape[-1] ** -0.5)
    return torch.stack(results)


def _convolved(channels: Tensor, gains: Tensor, own: Tensor | None = None) -> Tensor:
    """The causal convolution of ``[n, channels]``, channel by channel, with gains ``[channels, 1, width]``; of each
    token itself ``own`` ``[n, channels]`` takes the place."""
    if own is not None:
        last = gains[:, 0, -1]
        return _convolved(channels, torch.cat((gains[..., :-1], 0 * gains[..., -1:]), -1)) + own * last
    padded = F.pad(channels.T[None], (gains.shape[2] - 1, 0))
    return F.conv1d(padded, gains, groups=gains.shape[0])[0].T


def _projected(
    linear: LinearAttention, project: Callable[[Tensor, str], Tensor], x: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The channels of the convolution ``[n, channels]``, the gate of the result ``[n, value heads, value_dim]``, and
    what makes rate and decay, each ``[n, value heads]``."""
    heads, key_heads = linear.num_value_heads, linear.num_key_heads
    if not linear.by_key_head:
        channels, gate, rate, step = (project(x, f"{name}.in_proj_{part}") for part in ("qkv", "z", "b", "a"))
        return channels, gate.unflatten(-1, (heads, -1)), rate, step
    values = linear.values_dim // key_heads
    parts = project(x, f"{name}.in_proj_qkvz").unflatten(-1, (key_heads, -1))
    *channels, gate = parts.split((linear.key_dim, linear.key_dim, values, values), -1)
    rate, step = project(x, f"{name}.in_proj_ba").unflatten(-1, (key_heads, 2, -1)).unbind(2)
    joined = torch.cat([part.flatten(1) for part in channels], -1)
    return joined, gate.flatten(1).unflatten(-1, (heads, -1)), rate.flatten(1), step.flatten(1)
