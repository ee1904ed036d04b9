"""The sizes of linear attention with a delta rule whose state forgets key channel by key channel (Kimi Delta Attention,
arXiv 2510.26692, section 3), and of its state."""

from collections.abc import Mapping
from dataclasses import dataclass

from model_defs.linear import SMALLEST_DIM, DeltaRule


@dataclass(frozen=True)
class ChannelDelta(DeltaRule):
    """Layers of it: heads each have a query, a key and a value of ``head_dim`` numbers, and a decay for each row of
    their matrix S. What makes decays, and the gate of the result, is two projections one after the other, with
    ``head_dim`` numbers between them.
    """

    layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        self.check_sizes(num_heads=1, head_dim=SMALLEST_DIM, conv_width=2)

    @property
    def module(self) -> str:
        return "self_attn"

    @property
    def output(self) -> str:
        return "o_proj"

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.head_dim

    @property
    def keys_dim(self) -> int:
        return self.num_heads * self.head_dim

    def exact_rows(self, is_above: bool = False) -> int:
        return 0 if is_above else self.num_heads + self.head_dim

    @property
    def gate_matrix(self) -> tuple[int, int]:
        return self.keys_dim, self.head_dim

    @property
    def decay_matrix(self) -> tuple[int, int]:
        return self.keys_dim, self.head_dim

    @property
    def input_parts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return dict.fromkeys("kv", self.keys_dim), {"b": self.num_heads, "f_a": self.head_dim}

    def input_name(self, part: str) -> str:
        return f"{self.module}.{part}_proj_swiftkv"

    @property
    def num_gates(self) -> int:
        return self.num_heads + self.keys_dim
