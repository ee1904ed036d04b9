"""The sizes of layers of Mamba-2 (arXiv 2405.21060), and of their state."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from model_defs.errors import ModelError
from model_defs.fields import optional_int, require_int
from model_defs.state_layers import CONVOLVE, MAX_STATE, StateLayers

SCAN = "mamba2_scan"
SMALLEST_DIM = 16
"""Of all heads: compiling takes gains of up to 8 elements for constants of the code."""


@dataclass(frozen=True)
class Mamba2(StateLayers):
    """``layers``, ascending, keep no K and V of their tokens but a state of each sequence (``StateLayers``).

    A head has a state ``[state_dim, head_dim]``, and neighbouring heads of one of ``num_groups`` groups have B and C in
    common. x of all heads, B and C are a causal convolution over the last ``conv_width`` tokens, channel by channel, of
    what the projection makes. The pools are of the projections of the last ``conv_width - 1`` tokens, and of states.
    Above a cut the single input makes x, B, C and steps; of the last token a survivor has a C of its own, so the first
    pool keeps one token more.
    """

    layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        self.check_layers()
        for name in (each.name for each in fields(self) if each.name != "layers"):
            if not 1 <= getattr(self, name) <= MAX_STATE:
                raise ModelError(f"{name} of Mamba-2 is {getattr(self, name)}; it must be from 1 to {MAX_STATE}.")
        if self.num_heads % self.num_groups:
            raise ModelError(
                f"The {self.num_heads} heads of Mamba-2 must be a multiple of its {self.num_groups} groups."
            )
        if self.conv_width < 2:
            raise ModelError(f"conv_width of Mamba-2 is {self.conv_width}; it must be at least 2.")
        if self.inner_dim < SMALLEST_DIM:
            raise ModelError(f"The heads of Mamba-2 have {self.inner_dim} elements; they must have {SMALLEST_DIM}.")
        if any(math.prod(shape) > MAX_STATE for shape in self.row_shapes()):
            raise ModelError(f"A state of Mamba-2 has more than {MAX_STATE} numbers; config.json is damaged.")

    @property
    def inner_dim(self) -> int:
        """Numbers of one token's x, and of the gate of the result."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x of all heads, B and C of all groups."""
        return self.inner_dim + 2 * self.queries_dim

    @property
    def queries_dim(self) -> int:
        """Numbers of one token's C."""
        return self.num_groups * self.state_dim

    @property
    def title(self) -> str:
        return "Mamba-2"

    @property
    def operators(self) -> tuple[str, ...]:
        return (CONVOLVE, SCAN)

    @property
    def read_operators(self) -> tuple[str, ...]:
        return self.operators

    @property
    def input_parts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return {"xbc": self.conv_channels}, {"dt": self.num_heads}

    def row_shapes(self, is_above: bool = False) -> tuple[tuple[int, ...], ...]:
        kept = self.conv_width if is_above else self.conv_width - 1
        return (kept, self.conv_channels), (self.num_heads, self.state_dim, self.head_dim)

    @property
    def result_dim(self) -> int:
        return self.inner_dim

    def rounded_rows(self, is_above: bool = False) -> int:
        return self.inner_dim + (self.queries_dim if is_above else self.conv_channels)

    def exact_rows(self, is_above: bool = False) -> int:
        return 0 if is_above else self.num_heads

    @property
    def read_flops(self) -> int:
        """C'S, and what skips the state."""
        return 2 * (self.state_dim + 1) * self.inner_dim

    @property
    def own_flops(self) -> int:
        """The convolution once more."""
        return 2 * self.conv_width * self.conv_channels

    def update_flops(self, is_above: bool = False) -> int:
        """The convolution, and of each number of S the decay and a multiply-add."""
        return 3 * self.state_dim * self.inner_dim + 2 * self.conv_width * self.conv_channels

    @property
    def sum_terms(self) -> int:
        return self.conv_width + 2 * self.state_dim + self.inner_dim // self.num_groups


KINDS = ("layer_types", "layers_block_type")
SIZES = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand")
"""Keys of ``config.json`` that ``mamba2_from_hf`` reads."""

FIXED: Mapping[str, tuple[Any, ...]] = {
    "mamba_conv_bias": (True,),
    "mamba_proj_bias": (False,),
    "time_step_limit": ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
}
MAMBA, ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")
"""What ``layer_types`` calls a layer of Mamba-2, and one with K and V."""


def mamba2_from_hf(hf: Mapping[str, Any]) -> Mamba2 | None:
    """Return what a ``config.json`` says of its layers of Mamba-2, None where it has none; raises ModelError, also
    where no layer is left with K and V."""
    num_layers, hidden = require_int(hf, "num_hidden_layers"), require_int(hf, "hidden_size")
    named = [hf[name] for name in KINDS if hf.get(name) is not None]
    known = (*MAMBA, *ATTENTION)
    for kinds in named or [None]:
        if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
            raise ModelError(
                f"layer_types is {reprlib.repr(kinds)} in config.json; it must say mamba or attention of each of the "
                f"{num_layers} layers."
            )
    found = {tuple(layer for layer, kind in enumerate(kinds) if kind in MAMBA) for kinds in named}
    if len(found) > 1:
        raise ModelError("layer_types and layers_block_type of config.json differ; they are one list.")
    layers = found.pop()
    if len(layers) == num_layers:
        raise ModelError("All layers of the model are of Mamba-2; at least one must have attention.")
    if not layers:
        return None
    heads, inner = optional_int(hf, "mamba_n_heads", 128), optional_int(hf, "mamba_expand", 2) * hidden
    head_dim = inner // heads if hf.get("mamba_d_head") in (None, "auto") else require_int(hf, "mamba_d_head")
    if heads * head_dim != inner:
        raise ModelError(
            f"mamba_n_heads ({heads}) times mamba_d_head ({head_dim}) must be mamba_expand times hidden_size ({inner})."
        )
    return Mamba2(
        layers=layers,
        num_heads=heads,
        head_dim=head_dim,
        num_groups=optional_int(hf, "mamba_n_groups", 1),
        state_dim=optional_int(hf, "mamba_d_state", 256),
        conv_width=optional_int(hf, "mamba_d_conv", 4),
    )
