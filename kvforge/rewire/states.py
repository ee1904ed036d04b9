"""What makes and reads the state of a linear layer above a cut, from its own tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvforge.rewire.source import PlainCheckpoint
from model_defs import ModelConfig
from model_defs.linear import LinearAttention
from model_defs.weights import parts_by_key_head


def state_tensors(
    source: PlainCheckpoint, config: ModelConfig, layer: int, fold: bool
) -> dict[str, tuple[str, Callable[[], Tensor]]]:
    """Return by name a tensor that it is like, and a function that makes it.

    Rows of k, v, b and a are the layer's own, with ``fold`` times the gain of its input norm. Queries have no
    convolution: theirs are times the gain of the token's own input in it.
    """
    assert isinstance(config.linear, LinearAttention)
    linear, name, keys = config.linear, f"model.layers.{layer}.linear_attn", config.linear.keys_dim
    read = source.checkpoint.read_raw

    def rows(part: str) -> Tensor:
        if linear.by_key_head:
            stored = parts_by_key_head(linear, config.hidden_size, name)[part]
            return torch.cat([read(each.name)[each.rows.start : each.rows.stop] for each in stored if each.rows])
        return read(f"{name}.in_proj_{part}.weight")

    def of_input(part: str) -> Tensor:
        made = rows("qkv")[keys:] if part == "kv" else rows(part)
        if not fold:
            return made
        gain = read(f"model.layers.{layer}.input_layernorm.weight").double() + config.norm_offset
        return made.double() * gain

    def queries() -> Tensor:
        return rows("qkv")[:keys].double() * read(f"{name}.conv1d.weight")[:keys, 0, -1:].double()

    like = f"{name}.in_proj_{'qkvz' if linear.by_key_head else 'qkv'}.weight"
    made: dict[str, Callable[[], Tensor]] = {"q": queries, "z": lambda: rows("z")}
    made |= {part: lambda part=part: of_input(part) for part in ("kv", "b", "a")}  # type: ignore[misc]
    found = {f"{name}.in_proj_{part}_swiftkv.weight": (like, make) for part, make in made.items()}
    conv = f"{name}.conv1d.weight"
    return found | {f"{name}.conv1d_swiftkv.weight": (conv, lambda: read(conv)[keys:])}
