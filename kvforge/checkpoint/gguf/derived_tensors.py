"""Tensors of a GGUF file as those of a checkpoint: dequantized, with rows and gains as Hugging Face has them."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvforge.checkpoint.gguf.header import BLOCKS, StoredTensor, gguf_package
from kvforge.common.errors import CheckpointError
from plugins.packed_linear.int4 import Codes

_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_AT_ONCE = 1 << 21
"""Numbers that are dequantized at a time: NumPy's intermediate results take several times their bytes."""

_CODES = "Q4_0"
"""What has the codes that int4 engines keep: 32 numbers of 4 bits less 8, and a float16 scale."""


@dataclass(frozen=True)
class GgufPiece:
    """A tensor of a checkpoint that is made of a stored one.

    ``index`` is the one of its first dimension that is taken, where it has those of all experts. ``paired_heads``
    is the number of heads whose rows stand in the order of llama.cpp: those that rotate together beside each other.
    ``offset`` is added to the stored numbers.
    """

    stored: StoredTensor
    index: int | None = None
    paired_heads: int = 0
    offset: float = 0.0

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that it is read from."""
        return (self.stored.file,)

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored in blocks of integers with scales."""
        return self.stored.kind in BLOCKS

    @property
    def has_codes(self) -> bool:
        """Whether ``codes`` returns any."""
        return self.stored.kind == _CODES and len(self._shape) == 2 and not self.offset

    def layout(self) -> tuple[tuple[int, ...], str]:
        """Return its shape, and its dtype in safetensors' spelling: F32 for what is dequantized."""
        return self._shape, "F32" if self.is_quantized or self.offset else self.stored.kind

    def read(self, rows: tuple[int, int] | None = None) -> Tensor:
        """Return it, or its ``rows`` (first, end).

        Raises:
            CheckpointError: the file ends too soon, or its rows are not those of whole heads.
        """
        if rows is None or self.paired_heads:
            whole = self._in_order(self._rows(0, self._num_rows)).view(self._shape)
            return whole if rows is None else whole[rows[0] : rows[1]]
        if len(self._shape) == 1:
            return self.read()[rows[0] : rows[1]]
        return self._rows(*rows)

    def codes(self) -> Codes | None:
        """Return a weight in 4 bits as int4 engines keep it, every value as it is; None for any other."""
        if not self.has_codes:
            return None
        blocks = self._in_order(self._raw(0, self._num_rows)).view(self._num_rows, -1, self.stored.block_bytes)
        scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
        packed = blocks[..., 2:]
        return Codes(torch.cat((packed & 15, packed >> 4), -1).view(self._shape), scales)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.stored.shape if self.index is None else self.stored.shape[1:]

    @property
    def _num_rows(self) -> int:
        """Rows of a matrix; a vector is one row."""
        return math.prod(self._shape[:-1])

    @property
    def _row_bytes(self) -> int:
        return self._shape[-1] // self.stored.block * self.stored.block_bytes

    def _raw(self, first: int, end: int) -> Tensor:
        """The bytes of stored rows, uint8 ``[rows, bytes]``."""
        begin = self.stored.offset + ((self.index or 0) * self._num_rows + first) * self._row_bytes
        count = (end - first) * self._row_bytes
        try:
            content = np.fromfile(self.stored.file, dtype=np.uint8, count=count, offset=begin)
        except OSError as error:
            raise CheckpointError(f"{self.stored.file} cannot be read ({error.strerror}).") from None
        if content.size != count:
            raise CheckpointError(f"{self.stored.file} ends within tensor {self.stored.name}; download it again.")
        return torch.from_numpy(content).view(end - first, self._row_bytes)

    def _rows(self, first: int, end: int) -> Tensor:
        """The numbers of stored rows, ``[rows, columns]``."""
        if not self.is_quantized:
            numbers = self._raw(first, end).view(_TORCH[self.stored.kind])
            return numbers.float() + self.offset if self.offset else numbers
        package = gguf_package()
        kind = package.GGMLQuantizationType[self.stored.kind]
        numbers = torch.empty(end - first, self._shape[-1])
        step = max(_AT_ONCE // self._shape[-1], 1)
        for start in range(first, end, step):
            stop = min(start + step, end)
            some = package.quants.dequantize(self._raw(start, stop).numpy(), kind)
            numbers[start - first : stop - first] = torch.from_numpy(np.ascontiguousarray(some))
        return numbers + self.offset if self.offset else numbers

    def _in_order(self, rows: Tensor) -> Tensor:
        """All rows in the order of Hugging Face, where a head's halves rotate together."""
        if not self.paired_heads:
            return rows
        outputs = self._shape[0]
        if outputs % (2 * self.paired_heads):
            raise CheckpointError(
                f"Tensor {self.stored.name} in {self.stored.file} has {outputs} rows, which are not those of "
                f"{self.paired_heads} heads; it is damaged, download it again."
            )
        of_heads = rows.view(self.paired_heads, outputs // self.paired_heads // 2, 2, -1)
        return of_heads.transpose(1, 2).reshape(rows.shape)
