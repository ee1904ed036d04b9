"""Layers that keep a state of a sequence, of one size at any length, in place of K and V: what all kinds have."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from model_defs.errors import ModelError

Kind = TypeVar("Kind", bound="StateLayers")
CONVOLVE = "short_conv"
MAX_STATE = 2**24
"""Of a layer's state, in numbers of one sequence: eight times that of the largest published model."""


class StateLayers(ABC):
    """``layers``, ascending, keep a state of each sequence; a kind is a frozen dataclass with the sizes of one layer.

    The state of a layer is in pools of one row for each state that is kept, whose shapes ``row_shapes`` has. The first
    has what the convolution reads of the last tokens, oldest first, in the dtype of the model; others are in float32.
    The lower graph takes the pools of each layer, in order of the layers, behind those of K and V, and then two inputs
    more, its last:

    - ``state_read`` int32 ``[S]``: the row that each sequence of the step goes on from, -1 at its start;
    - ``state_write`` int32 ``[T]``: the row that the state after each packed token goes to, -1 for none.

    The upper graph of a model with a cut takes of each layer above it the pools that ``read_operators`` read, its last,
    and ``survivor_state`` int32 ``[R]``: the rows that the states after the survivors were written to.

    In a step no row is written twice, and none is read by one sequence and written by another.
    """

    layers: tuple[int, ...]

    @property
    def module(self) -> str:
        """What ``model_defs.weights`` calls what a layer has before its MLP."""
        return "linear_attn"

    @property
    def output(self) -> str:
        """What it calls the output projection in it."""
        return "out_proj"

    @property
    @abstractmethod
    def title(self) -> str:
        """What messages say that a model with such layers has."""

    @property
    @abstractmethod
    def operators(self) -> tuple[str, ...]:
        """The operators of a layer on its pools, one on each, in order."""

    @property
    def read_operators(self) -> tuple[str, ...]:
        """Those by which a layer above a cut reads its pools, the last of them where they are fewer; () where it
        cannot be above one."""
        return ()

    @property
    def may_be_above_a_cut(self) -> bool:
        """Whether states can be made of the single input."""
        return bool(self.read_operators)

    @property
    def first_read(self) -> int:
        """The first of a layer's pools that is read above a cut."""
        return len(self.operators) - len(self.read_operators)

    @abstractmethod
    def row_shapes(self, is_above: bool = False) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a row of each pool of a layer, which is above a cut or not."""

    @property
    @abstractmethod
    def result_dim(self) -> int:
        """Numbers of one token that go into the layer's output projection."""

    @abstractmethod
    def rounded_rows(self, is_above: bool = False) -> int:
        """Return the outputs of a layer's projections of the stream that are quantized with others."""

    def exact_rows(self, is_above: bool = False) -> int:
        """Return the outputs of those that never are."""
        return 0

    @property
    def gate_matrix(self) -> tuple[int, int]:
        """Outputs and inputs of the projection that makes the result's gate of what one of the stream gives; 0 where
        that is the gate. It is quantized with others."""
        return 0, 0

    @property
    def decay_matrix(self) -> tuple[int, int]:
        """The same of what makes decays, which never is."""
        return 0, 0

    @property
    def input_parts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """What the single input makes for a layer above a cut, by the parts of its projection and with their outputs:
        what is quantized with others, and what never is."""
        return {}, {}

    def input_name(self, part: str) -> str:
        """Return what ``model_defs.weights`` calls the projection of such a part in a layer."""
        return f"{self.module}.in_proj_{part}_swiftkv"

    @property
    def input_rows(self) -> tuple[int, int]:
        """The outputs of both."""
        rounded, exact = self.input_parts
        return sum(rounded.values()), sum(exact.values())

    @property
    def num_gates(self) -> int:
        """Numbers of one token that say what a state forgets and takes up."""
        return self.input_rows[1]

    @property
    @abstractmethod
    def read_flops(self) -> int:
        """FLOPs by which one token reads a state."""

    @property
    def own_flops(self) -> int:
        """FLOPs by which a token that goes past a cut joins its own to what the single input made for a layer."""
        return 0

    @abstractmethod
    def update_flops(self, is_above: bool = False) -> int:
        """Return the FLOPs by which one token changes a state."""

    @property
    @abstractmethod
    def sum_terms(self) -> int:
        """Terms of the sums on the longest path from the projections to the result, of one token."""

    def first_layers(self: Kind, count: int) -> Kind | None:
        """Return the same of the first ``count`` layers; None where none of them keeps a state."""
        layers = tuple(layer for layer in self.layers if layer < count)
        return replace(self, layers=layers) if layers else None  # type: ignore[type-var]

    def check_layers(self) -> None:
        """Raise ModelError unless ``layers`` are named once each, in order."""
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ModelError("The layers that keep a state must be named once each, in order.")
