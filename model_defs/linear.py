"""The sizes of linear attention with a gated delta rule (Gated DeltaNet, arXiv 2412.06464), and of its state."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from model_defs.errors import ModelError
from model_defs.fields import optional_int, require_int
from model_defs.state_layers import CONVOLVE, MAX_STATE, StateLayers

LINEAR, FULL = "linear_attention", "full_attention"
"""What ``layer_types`` calls a layer with linear attention, and one with K and V."""

RECUR = "gated_delta_rule"


@dataclass(frozen=True)
class LinearAttention(StateLayers):
    """``layers``, ascending, keep no K and V of their tokens but a state of each sequence (``StateLayers``).

    A value head has a matrix S ``[key_dim, value_dim]``, and a key head serves as many neighbouring value heads as
    there are for each. q, k and v of a token are a causal convolution over the last ``conv_width`` tokens, channel by
    channel, of what the projections make. A layer's pools are "conv", of the projections of the last ``conv_width - 1``
    tokens, and ``state``, S of all heads. Above a cut queries have no convolution.

    ``by_key_head`` checkpoints have the projections of a key head, and of the value heads that it serves, together.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    by_key_head: bool = False

    def __post_init__(self) -> None:
        self.check_layers()
        for name in (each.name for each in fields(self) if each.name not in ("layers", "by_key_head")):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_STATE:
                raise ModelError(f"{name} of linear attention is {value!r}; it must be from 1 to {MAX_STATE}.")
        if self.num_value_heads % self.num_key_heads:
            raise ModelError(
                f"linear_num_value_heads ({self.num_value_heads}) must be a multiple of linear_num_key_heads "
                f"({self.num_key_heads})."
            )
        if self.conv_width < 2:
            raise ModelError(f"linear_conv_kernel_dim is {self.conv_width}; it must be at least 2.")
        if any(math.prod(shape) > MAX_STATE for shape in self.row_shapes()):
            raise ModelError(f"A state of linear attention has more than {MAX_STATE} numbers; config.json is damaged.")

    @property
    def keys_dim(self) -> int:
        """Numbers of one token's queries, and of its keys."""
        return self.num_key_heads * self.key_dim

    @property
    def values_dim(self) -> int:
        """Numbers of one token's values."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q of all heads, k, v."""
        return 2 * self.keys_dim + self.values_dim

    @property
    def state_channels(self) -> int:
        """Those of them that the state is made of: k and v."""
        return self.keys_dim + self.values_dim

    @property
    def title(self) -> str:
        return "linear attention"

    @property
    def operators(self) -> tuple[str, ...]:
        return (CONVOLVE, RECUR)

    @property
    def read_operators(self) -> tuple[str, ...]:
        return (RECUR,)

    def row_shapes(self, is_above: bool = False) -> tuple[tuple[int, ...], ...]:
        channels = self.state_channels if is_above else self.conv_channels
        return (self.conv_width - 1, channels), (self.num_value_heads, self.key_dim, self.value_dim)

    @property
    def result_dim(self) -> int:
        return self.values_dim

    def rounded_rows(self, is_above: bool = False) -> int:
        return (self.keys_dim if is_above else self.conv_channels) + self.values_dim

    def exact_rows(self, is_above: bool = False) -> int:
        return 0 if is_above else 2 * self.num_value_heads

    @property
    def input_parts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return {"kv": self.state_channels}, dict.fromkeys("ba", self.num_value_heads)

    @property
    def read_flops(self) -> int:
        """S'q."""
        return 2 * self.key_dim * self.values_dim

    def update_flops(self, is_above: bool = False) -> int:
        """The convolution, and of each number of S the decay, S'k and the update: a product and two multiply-adds."""
        channels = self.state_channels if is_above else self.conv_channels
        return 5 * self.key_dim * self.values_dim + 2 * self.conv_width * channels

    @property
    def sum_terms(self) -> int:
        return self.conv_width + 3 * self.key_dim + self.value_dim


SMALLEST_DIM = 16
"""Of a value: compiling takes gains of up to 8 elements for constants of the code."""

READS = (
    *("layer_types", "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
)
"""Keys of ``config.json`` that ``linear_from_hf`` reads."""


def linear_from_hf(hf: Mapping[str, Any], by_key_head: bool) -> LinearAttention | None:
    """Return what a ``config.json`` says of its layers with linear attention, None where it has none; raises
    ModelError, also where no layer is left with K and V."""
    kinds = _kinds(hf, require_int(hf, "num_hidden_layers"))
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    if len(layers) == len(kinds):
        raise ModelError("All layers of the model have linear attention; at least one must have full_attention.")
    value_dim = optional_int(hf, "linear_value_head_dim", 128)
    if value_dim < SMALLEST_DIM:
        raise ModelError(f"linear_value_head_dim is {value_dim}; it must be at least {SMALLEST_DIM}.")
    if not layers:
        return None
    return LinearAttention(
        layers=layers,
        num_key_heads=optional_int(hf, "linear_num_key_heads", 16),
        num_value_heads=optional_int(hf, "linear_num_value_heads", 32),
        key_dim=optional_int(hf, "linear_key_head_dim", 128),
        value_dim=value_dim,
        conv_width=optional_int(hf, "linear_conv_kernel_dim", 4),
        by_key_head=by_key_head,
    )


def _kinds(hf: Mapping[str, Any], num_layers: int) -> list[str]:
    """What each layer is: as ``layer_types`` says, or every so many one with K and V."""
    kinds = hf.get("layer_types")
    if kinds is None:
        interval = optional_int(hf, "full_attention_interval", 4)
        return [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in (LINEAR, FULL) for kind in kinds):
        raise ModelError(
            f"layer_types is {reprlib.repr(kinds)} in config.json; it must say {LINEAR} or {FULL} of each of the "
            f"{num_layers} layers."
        )
    return kinds
