"""The sizes of linear attention with a delta rule whose state forgets key channel by key channel (Kimi Delta Attention,
arXiv 2510.26692, section 3), and of its state."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from model_defs.errors import ModelError
from model_defs.linear import RECUR, SMALLEST_DIM
from model_defs.state_layers import CONVOLVE, MAX_STATE, StateLayers


@dataclass(frozen=True)
class ChannelDelta(StateLayers):
    """As ``LinearAttention``, of heads that each have a query, a key and a value of ``head_dim`` numbers, and a decay
    for each row of their matrix S. What makes decays, and the gate of the result, is two projections one after the
    other, with ``head_dim`` numbers between them. Above a cut queries have no convolution.
    """

    layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        self.check_layers()
        least = {"num_heads": 1, "head_dim": SMALLEST_DIM, "conv_width": 2}
        for name, minimum in least.items():
            if not minimum <= getattr(self, name) <= MAX_STATE:
                raise ModelError(
                    f"{name} of linear attention is {getattr(self, name)}; it must be from {minimum} to {MAX_STATE}."
                )
        if any(math.prod(shape) > MAX_STATE for shape in self.row_shapes()):
            raise ModelError(f"A state of linear attention has more than {MAX_STATE} numbers; config.json is damaged.")

    @property
    def inner_dim(self) -> int:
        """Numbers of one token's queries, of its keys, and of its values."""
        return self.num_heads * self.head_dim

    @property
    def module(self) -> str:
        return "self_attn"

    @property
    def output(self) -> str:
        return "o_proj"

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
        channels = (2 if is_above else 3) * self.inner_dim
        return (self.conv_width - 1, channels), (self.num_heads, self.head_dim, self.head_dim)

    @property
    def result_dim(self) -> int:
        return self.inner_dim

    def rounded_rows(self, is_above: bool = False) -> int:
        return (1 if is_above else 3) * self.inner_dim + self.head_dim

    def exact_rows(self, is_above: bool = False) -> int:
        return 0 if is_above else self.num_heads + self.head_dim

    @property
    def gate_matrix(self) -> tuple[int, int]:
        return self.inner_dim, self.head_dim

    @property
    def decay_matrix(self) -> tuple[int, int]:
        return self.inner_dim, self.head_dim

    @property
    def input_parts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return dict.fromkeys("kv", self.inner_dim), {"b": self.num_heads, "f_a": self.head_dim}

    def input_name(self, part: str) -> str:
        return f"{self.module}.{part}_proj_swiftkv"

    @property
    def num_gates(self) -> int:
        return self.num_heads + self.inner_dim

    @property
    def read_flops(self) -> int:
        """S'q."""
        return 2 * self.head_dim * self.inner_dim

    def update_flops(self, is_above: bool = False) -> int:
        """The convolution, and of each number of S the decay, S'k and the update: a product and two multiply-adds."""
        channels = self.row_shapes(is_above)[0][1]
        return 5 * self.head_dim * self.inner_dim + 2 * self.conv_width * channels

    @property
    def sum_terms(self) -> int:
        return self.conv_width + 5 * self.head_dim
