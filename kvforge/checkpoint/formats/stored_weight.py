"""A weight that a checkpoint stores as integers: what a format must say of it, and what follows."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn, Protocol

import torch
from torch import Tensor

from kvforge.common.errors import CheckpointError
from plugins.packed_linear.int4 import GROUP_DEPTH, MIDDLE, Codes


class Tensors(Protocol):
    """A checkpoint's tensors, as ``kvforge.checkpoint.Checkpoint`` has them."""

    @property
    def path(self) -> Path: ...

    @property
    def file_of_tensor(self) -> Mapping[str, Path]: ...

    def layout(self, name: str) -> tuple[tuple[int, ...], str]: ...

    def read_raw(self, name: str, finite: bool = True) -> Tensor: ...


@dataclass(frozen=True)
class WeightFormat(ABC):
    """A format, with its settings in the checkpoint. Tensor names are those of the weight, ``….weight``, ``[N, K]``.

    A weight is (value - zero point) * scale, with a scale and a zero point for each output and group of inputs. Every
    method but ``holds`` raises CheckpointError for tensors that are missing or do not fit each other. ``group_sizes``
    are the numbers of inputs that groups have, empty where the checkpoint does not say that, and it is ``reordered``
    where groups need an index.
    """

    group_sizes: tuple[int, ...] = ()
    reordered: bool = False

    has_weights: ClassVar[bool] = True
    """Whether some weights are to be stored so."""

    name: ClassVar[str]
    """The format's name in sentences."""

    @abstractmethod
    def holds(self, tensors: Tensors, name: str) -> bool:
        """Whether weight ``name`` is stored so; others, such as a head left out, are ordinary tensors."""

    @abstractmethod
    def shape(self, tensors: Tensors, name: str) -> tuple[int, ...]:
        """Return ``(N, K)``, without reading the weight."""

    @abstractmethod
    def values(self, tensors: Tensors, name: str) -> Tensor:
        """Return the stored numbers ``[N, K]``: uint8 where they are packed, else as they are stored."""

    @abstractmethod
    def scales(self, tensors: Tensors, name: str) -> Tensor:
        """Return float32 ``[N, groups]``, or ``[1, 1]``."""

    @abstractmethod
    def zeros(self, tensors: Tensors, name: str) -> Tensor | None:
        """Return the zero points ``[N, groups]``, None where all are 0."""

    @abstractmethod
    def bits(self, tensors: Tensors, name: str) -> int:
        """Return the bits of a value."""

    def groups(self, tensors: Tensors, name: str) -> Tensor | None:
        """Return the group of each input, int64 ``[K]``; None where each has as many inputs, one after the other."""
        return None

    def group_depth(self, tensors: Tensors, name: str) -> int:
        """Return the inputs of a group that is regular; the last one may have fewer."""
        num_groups, depth = self.num_groups(tensors, name), self.shape(tensors, name)[1]
        for size in self.group_sizes or (depth // num_groups,):
            if size > 0 and -(-depth // size) == num_groups:
                return min(size, depth)
        self._refuse(tensors, name)

    def num_groups(self, tensors: Tensors, name: str) -> int:
        """Return how many groups the inputs have."""
        scales = self.scales(tensors, name)
        if scales.dim() != 2 or not scales.numel():
            self._refuse(tensors, name)
        return scales.shape[1]

    def groups_in(self, tensors: Tensors, name: str, index: str) -> Tensor | None:
        """Return ``groups`` from the index that tensor ``index`` holds, if it is there."""
        if index not in tensors.file_of_tensor:
            if self.reordered and self.num_groups(tensors, name) > 1:
                raise CheckpointError(
                    f"Tensor {index} is missing from {tensors.path}, whose config.json says that its groups are out of "
                    "order; download the checkpoint again."
                )
            return None
        depth = self.shape(tensors, name)[1]
        shape, dtype = tensors.layout(index)
        if shape != (depth,) or dtype not in ("I32", "I64"):
            self._refuse(tensors, name)
        found = tensors.read_raw(index).long()
        # Scales of any number of groups may go with an index that is out of order.
        is_regular = (found.diff() >= 0).all() and torch.equal(
            found, torch.arange(depth) // self.group_depth(tensors, name)
        )
        return None if is_regular else found

    def dequantize(self, tensors: Tensors, name: str, rows: slice = slice(None)) -> Tensor:
        """Return the weight, float32 ``[N, K]``, or its ``rows``."""
        depth = self.shape(tensors, name)[1]
        values, scales, zeros = self.values(tensors, name), self.scales(tensors, name), self.zeros(tensors, name)
        groups = self.groups(tensors, name)
        index = torch.arange(depth) // self.group_depth(tensors, name) if groups is None else groups
        self._check(tensors, name, values, scales, zeros, index)
        scales = scales if len(scales) == 1 else scales[rows]
        if zeros is None:
            return values[rows].float() * scales[:, index]
        zeros = zeros if len(zeros) == 1 else zeros[rows]
        return (values[rows].float() - zeros.float()[:, index]) * scales[:, index]

    def codes(self, tensors: Tensors, name: str) -> Codes | None:
        """Return a weight of 4 bits as an int4 engine keeps it, every value as it is; None where it cannot: of other
        bits, or where its groups are not multiples of 32 inputs, one after the other."""
        if not self.keeps_codes(tensors, name):
            return None
        values, scales, zeros = self.values(tensors, name), self.scales(tensors, name), self.zeros(tensors, name)
        outputs, depth = values.shape
        group_depth = self.group_depth(tensors, name)
        self._check(tensors, name, values, scales, zeros, torch.arange(depth) // group_depth)
        if scales.shape[1] == 1:
            group_depth = -(-depth // GROUP_DEPTH) * GROUP_DEPTH
        scales = scales.expand(outputs, -1)  # of the whole tensor, where there is one
        if self.has_middle_zeros(tensors, name):
            return Codes(values, scales, None, group_depth)
        if zeros is None:
            zeros = torch.zeros(scales.shape)
        return Codes(values, scales, zeros.expand(outputs, -1).to(torch.uint8), group_depth)

    def keeps_codes(self, tensors: Tensors, name: str) -> bool:
        """Whether ``codes`` returns any; reads no values."""
        if self.bits(tensors, name) != 4 or self.groups(tensors, name) is not None:
            return False
        return self.num_groups(tensors, name) == 1 or self.group_depth(tensors, name) % GROUP_DEPTH == 0

    def has_middle_zeros(self, tensors: Tensors, name: str) -> bool:
        """Whether every zero point is 8, which int4 engines need not store; reads no values."""
        zeros = self.zeros(tensors, name)
        return zeros is not None and bool((zeros == MIDDLE).all())

    def _check(
        self, tensors: Tensors, name: str, values: Tensor, scales: Tensor, zeros: Tensor | None, index: Tensor
    ) -> None:
        """Raise CheckpointError unless the parts of a weight fit each other and every scale is finite."""
        outputs, depth = self.shape(tensors, name)
        num_groups = scales.shape[-1]
        rows = (outputs, 1) if num_groups == 1 else (outputs,)
        fits = tuple(values.shape) == (outputs, depth) and len(scales) in rows
        fits = fits and len(index) == depth and int(index.min()) >= 0 and int(index.max()) < num_groups
        fits = fits and (zeros is None or zeros.shape == scales.shape)
        if not fits:
            self._refuse(tensors, name)
        if not bool(scales.isfinite().all()):
            raise CheckpointError(f"A scale of {name} in {tensors.path} is not finite; export the checkpoint again.")

    def _refuse(self, tensors: Tensors, name: str) -> NoReturn:
        raise CheckpointError(
            f"The parts of {name} in {tensors.path} do not fit each other as {self.name} stores them; download the "
            "checkpoint again, or correct quantization_config in its config.json."
        )


def part(name: str, ending: str) -> str:
    """Return the name of a part of weight ``name``: its module's ``ending``."""
    return name.removesuffix("weight") + ending


def matrix(tensors: Tensors, name: str, dtype: str) -> tuple[int, int]:
    """Return the shape of a stored matrix; raises CheckpointError unless it is one of ``dtype``."""
    shape, found = tensors.layout(name)
    if len(shape) != 2 or found != dtype:
        raise CheckpointError(
            f"Tensor {name} in {tensors.path} must be a matrix of {dtype}, not {found} of shape {list(shape)}; "
            "download the checkpoint again."
        )
    return shape[0], shape[1]


def float_scales(tensors: Tensors, name: str, dims: Sequence[int] = (2,)) -> Tensor:
    """Return stored scales in float32; raises CheckpointError unless they are floats with one of these numbers of
    dimensions."""
    shape, dtype = tensors.layout(name)
    if len(shape) not in dims or dtype not in ("F16", "BF16", "F32"):
        kind = "a matrix" if tuple(dims) == (2,) else "a number, a vector or a matrix"
        raise CheckpointError(
            f"Tensor {name} in {tensors.path} must be {kind} of F16, BF16 or F32, not {dtype} of shape {list(shape)}; "
            "download the checkpoint again."
        )
    return tensors.read_raw(name, finite=False).float()


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of ``bits`` (4 or 8) in int32 words ``[R, C]``, lowest first: uint8 ``[R, C * 32 / bits]``."""
    stored = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return stored
    return torch.stack((stored & 15, stored >> 4), dim=-1).view(len(words), stored.shape[1] * 2)
