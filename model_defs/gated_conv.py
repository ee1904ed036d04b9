"""The sizes of gated short convolutions in place of attention, and of their state."""

from collections.abc import Mapping
from dataclasses import dataclass

from model_defs.errors import ModelError
from model_defs.state_layers import CONVOLVE, MAX_STATE, StateLayers


@dataclass(frozen=True)
class GatedConv(StateLayers):
    """``layers``, ascending, keep no K and V of their tokens but a state of each sequence (``StateLayers``): three
    projections b, c and x of ``channels`` each, and the result c * conv(b * x), where conv is causal, over the last
    ``conv_width`` tokens, channel by channel. The pool is of b * x of the last ``conv_width - 1`` tokens. Above a cut
    the single input makes b * x of all tokens, one more of which are kept; a survivor has its own in place of its
    last."""

    layers: tuple[int, ...]
    channels: int
    conv_width: int

    def __post_init__(self) -> None:
        self.check_layers()
        if self.conv_width < 2:
            raise ModelError(f"conv_L_cache is {self.conv_width}; it must be at least 2.")
        if self.channels < 1 or (self.conv_width - 1) * self.channels > MAX_STATE:
            raise ModelError(f"A state of convolutions has more than {MAX_STATE} numbers; config.json is damaged.")

    @property
    def title(self) -> str:
        return "gated short convolutions"

    @property
    def operators(self) -> tuple[str, ...]:
        return (CONVOLVE,)

    @property
    def read_operators(self) -> tuple[str, ...]:
        return self.operators

    @property
    def input_parts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return {"bx": 2 * self.channels}, {}

    def row_shapes(self, is_above: bool = False) -> tuple[tuple[int, ...], ...]:
        return ((self.conv_width if is_above else self.conv_width - 1, self.channels),)

    @property
    def result_dim(self) -> int:
        return self.channels

    def rounded_rows(self, is_above: bool = False) -> int:
        return 3 * self.channels

    @property
    def read_flops(self) -> int:
        """The product by c."""
        return self.channels

    @property
    def own_flops(self) -> int:
        """The product by b and the convolution once more."""
        return self.update_flops()

    def update_flops(self, is_above: bool = False) -> int:
        """The product by b, and the convolution."""
        return (2 * self.conv_width + 1) * self.channels

    @property
    def sum_terms(self) -> int:
        return self.conv_width
