"""What makes and reads the state of a layer above a cut, from its own tensors."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvforge.rewire.source import PlainCheckpoint
from model_defs import ModelConfig
from model_defs.channel_delta import ChannelDelta
from model_defs.linear import LinearAttention
from model_defs.mamba2 import Mamba2
from model_defs.weights import parts_by_key_head

Made = dict[str, tuple[str, Callable[[], Tensor]]]
"""By name: a tensor that it is like, and a function that makes it."""


def state_tensors(source: PlainCheckpoint, config: ModelConfig, layer: int, fold: bool) -> Made:
    """Return what a layer has above the cut.

    What the single input makes is the layer's own, with ``fold`` times the gain of its input norm; so is what the
    layer's own input makes, and the convolution.
    """
    own, updates = _tensors(source, config, layer)

    def folded(make: Callable[[], Tensor]) -> Tensor:
        gain = source.checkpoint.read_raw(f"model.layers.{layer}.input_layernorm.weight").double() + config.norm_offset
        return make().double() * gain

    if fold:
        updates = {name: (like, partial(folded, make)) for name, (like, make) in updates.items()}
    return own | updates


def state_updates(source: PlainCheckpoint, config: ModelConfig, layer: int) -> Made:
    """Return those that the single input makes, as the layer has them."""
    return _tensors(source, config, layer)[1]


def _tensors(source: PlainCheckpoint, config: ModelConfig, layer: int) -> tuple[Made, Made]:
    """What the layer's own input makes, with the convolution; and what the single input makes."""
    assert config.linear is not None
    name, read = f"model.layers.{layer}.{config.linear.module}", source.checkpoint.read_raw
    new, like = f"{name}.in_proj{{}}_swiftkv.weight", f"{name}.in_proj"
    if isinstance(config.linear, ChannelDelta):
        own, of_input, made = _channel_delta(source, name)
        new, like = f"{name}.{{}}_proj_swiftkv.weight", f"{name}.q_proj"
    elif isinstance(config.linear, LinearAttention):
        own, of_input, made = _linear_attention(source, config, config.linear, name)
    else:
        parts = _mamba2(config.linear) if isinstance(config.linear, Mamba2) else _gated_conv(config.hidden_size)
        own, of_input = ({each: _rows(source, name, slices) for each, slices in part.items()} for part in parts)
        copied = [each for each in (f"{name}.conv1d.weight", f"{name}.conv1d.bias") if each in source.specs]
        made = {each.replace("conv1d", "conv1d_swiftkv"): (each, partial(read, each)) for each in copied}

    like = next(each for each in source.specs if each.startswith(like))
    made |= {new.format(part): (like, make) for part, make in own.items()}
    return made, {new.format(part): (like, make) for part, make in of_input.items()}


Parts = dict[str, Callable[[], Tensor]]
Slices = dict[str, list[tuple[int, int]]]


def _linear_attention(
    source: PlainCheckpoint, config: ModelConfig, linear: LinearAttention, name: str
) -> tuple[Parts, Parts, Made]:
    """Queries have no convolution: theirs are times the gain of the token's own input in it."""
    keys, read = linear.keys_dim, source.checkpoint.read_raw

    def rows(part: str) -> Tensor:
        if linear.by_key_head:
            stored = parts_by_key_head(linear, config.hidden_size, name)[part]
            return torch.cat([read(each.name)[each.rows.start : each.rows.stop] for each in stored if each.rows])
        return read(f"{name}.in_proj_{part}.weight")

    conv = f"{name}.conv1d.weight"
    own = {
        "_q": lambda: rows("qkv")[:keys].double() * read(conv)[:keys, 0, -1:].double(),
        "_z": lambda: rows("z"),
    }
    of_input = {"_kv": lambda: rows("qkv")[keys:], "_b": lambda: rows("b"), "_a": lambda: rows("a")}
    return own, of_input, {f"{name}.conv1d_swiftkv.weight": (conv, lambda: read(conv)[keys:])}


def _channel_delta(source: PlainCheckpoint, name: str) -> tuple[Parts, Parts, Made]:
    """The same; of what makes gates and decays the first projection is the single input's, or the layer's own."""
    read = source.checkpoint.read_raw

    def queries() -> Tensor:
        return read(f"{name}.q_proj.weight").double() * read(f"{name}.q_conv1d.weight")[:, 0, -1:].double()

    of_input: Parts = {part: partial(read, f"{name}.{part}_proj.weight") for part in ("k", "v", "b", "f_a")}
    convolutions = [f"{name}.{part}_conv1d" for part in "kv"]
    made: Made = {
        f"{each}_swiftkv.weight": (f"{each}.weight", partial(read, f"{each}.weight")) for each in convolutions
    }
    return {"q": queries, "g_a": partial(read, f"{name}.g_a_proj.weight")}, of_input, made


def _mamba2(mamba: Mamba2) -> tuple[Slices, Slices]:
    """Rows of the one projection: the gate and C are the layer's own input's, x, B, C and steps the single one's."""
    inner, end = mamba.inner_dim, mamba.inner_dim + mamba.conv_channels
    own = {"_z": [(0, inner)], "_c": [(end - mamba.queries_dim, end)]}
    return own, {"_xbc": [(inner, end)], "_dt": [(end, end + mamba.num_heads)]}


def _gated_conv(channels: int) -> tuple[Slices, Slices]:
    """The same: b, c and x of the layer's own input, b and x of the single one."""
    return {"": [(0, 3 * channels)]}, {"_bx": [(0, channels), (2 * channels, 3 * channels)]}


def _rows(source: PlainCheckpoint, name: str, slices: list[tuple[int, int]]) -> Callable[[], Tensor]:
    """What reads these rows of the layer's projection."""

    def read() -> Tensor:
        whole = source.checkpoint.read_raw(f"{name}.in_proj.weight")
        return torch.cat([whole[start:stop] for start, stop in slices])

    return read
