"""The sizes of linear attention with a gated delta rule (Gated DeltaNet, arXiv 2412.06464), and of its state."""

import math
import reprlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_defs.errors import ModelError
from model_defs.fields import optional_int, require_int
from model_defs.state_layers import CONVOLVE, MAX_STATE, StateLayers

LINEAR, FULL = "linear_attention", "full_attention"
"""What ``layer_types`` calls a layer with linear attention, and one with K and V."""

RECUR = "gated_delta_rule"
SMALLEST_DIM = 16
"""Of a value: compiling takes gains of up to 8 elements for constants of the code."""


class DeltaRule(StateLayers):
    """What all layers with a gated delta rule have in common.

    A value head has a matrix S ``[key_dim, value_dim]``. q, k and v of a token are a causal convolution over the last
    ``conv_width`` tokens, channel by channel, of what the projections make. A layer's pools are "conv", of the
    projections of the last ``conv_width - 1`` tokens, and ``state``, S of all heads. Above a cut queries have no
    convolution.
    """

    conv_width: int

    def check_sizes(self, **least: int) -> None:
        """Raise ModelError unless each size is an integer that is at least so much, and states are not too large."""
        self.check_layers()
        for name, minimum in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= MAX_STATE:
                raise ModelError(f"{name} of linear attention is {value!r}; it must be from {minimum} to {MAX_STATE}.")
        if any(math.prod(shape) > MAX_STATE for shape in self.row_shapes()):
            raise ModelError(f"A state of linear attention has more than {MAX_STATE} numbers; config.json is damaged.")

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, int, int]:
        """Value heads, and rows and columns of S of each."""

    @property
    @abstractmethod
    def keys_dim(self) -> int:
        """Numbers of one token's queries, and of its keys."""

    @property
    def values_dim(self) -> int:
        """Numbers of one token's values."""
        heads, _, value_dim = self.state_shape
        return heads * value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q of all heads, k, v."""
        return self.keys_dim + self.state_channels

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
        return (self.conv_width - 1, channels), self.state_shape

    @property
    def result_dim(self) -> int:
        return self.values_dim

    @property
    def gate_rows(self) -> int:
        """Outputs of the stream's projection that make the result's gate."""
        return self.gate_matrix[1] or self.values_dim

    def rounded_rows(self, is_above: bool = False) -> int:
        return (self.keys_dim if is_above else self.conv_channels) + self.gate_rows

    @property
    def read_flops(self) -> int:
        """S'q."""
        return 2 * math.prod(self.state_shape)

    def update_flops(self, is_above: bool = False) -> int:
        """The convolution, and of each number of S the decay, S'k and the update: a product and two multiply-adds."""
        return 5 * math.prod(self.state_shape) + 2 * self.conv_width * self.row_shapes(is_above)[0][1]

    @property
    def sum_terms(self) -> int:
        _, key_dim, value_dim = self.state_shape
        return self.conv_width + 3 * key_dim + value_dim + self.gate_matrix[1]


@dataclass(frozen=True)
class LinearAttention(DeltaRule):
    """Layers of Gated DeltaNet: a key head serves as many neighbouring value heads as there are for each.

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
        heads = dict.fromkeys(("num_key_heads", "num_value_heads", "key_dim", "value_dim"), 1)
        self.check_sizes(**heads, conv_width=2)
        if self.num_value_heads % self.num_key_heads:
            raise ModelError(
                f"linear_num_value_heads ({self.num_value_heads}) must be a multiple of linear_num_key_heads "
                f"({self.num_key_heads})."
            )

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_value_heads, self.key_dim, self.value_dim

    @property
    def keys_dim(self) -> int:
        return self.num_key_heads * self.key_dim

    def exact_rows(self, is_above: bool = False) -> int:
        return 0 if is_above else 2 * self.num_value_heads

    @property
    def input_parts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return {"kv": self.state_channels}, dict.fromkeys("ba", self.num_value_heads)


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
    value_dim = optional_int(hf, "linear_value_head_dim", 128, minimum=SMALLEST_DIM)
    if not layers:
        return None
    return LinearAttention(
        layers=layers,
        num_key_heads=optional_int(hf, "linear_num_key_heads", 16),
        num_value_heads=optional_int(hf, "linear_num_value_heads", 32),
        key_dim=optional_int(hf, "linear_key_head_dim", 128),
        value_dim=value_dim,
        conv_width=optional_int(hf, "linear_conv_kernel_dim", 4, minimum=2),
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
