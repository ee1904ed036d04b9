"""The head of a GGUF file: its metadata, and where its tensors lie.

The package ``gguf`` reads these too, with several objects for each of the hundreds of thousands of strings that a
vocabulary has, in seconds and without noticing that a file ends too soon. It says what the formats are called and how
large their blocks are, and dequantizes them.
"""

import math
import mmap
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kvforge.common.checkpoint_files import GGUF_MAGIC as MAGIC
from kvforge.common.errors import CheckpointError
from kvforge.common.extras import import_failed
from kvforge.common.lfs import fetch_it, is_lfs_pointer

VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""How ``struct`` spells each type of a value; all are little-endian."""

MAX_DIMS = 4

PLAIN = ("F32", "F16", "BF16")
BLOCKS = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
"""The formats of tensors that are read: numbers, and blocks of integers with scales."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: ``shape`` has the outputs of a matrix first, as in torch; ``offset`` and ``num_bytes`` are in
    bytes from the beginning of the file. ``block`` numbers take ``block_bytes``."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int
    block: int
    block_bytes: int


@dataclass(frozen=True)
class Header:
    """What a file says before its tensors' numbers. ``metadata`` holds numbers, booleans, texts and lists of these."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[StoredTensor, ...]


def gguf_package() -> Any:
    """Return the package ``gguf``; raises MissingToolError where it cannot be imported."""
    try:
        import gguf
    except Exception as error:
        raise import_failed("GGUF files need gguf", "gguf", error) from None
    return gguf


def read_header(path: Path) -> Header:
    """Return the head of the GGUF file at ``path``.

    Raises:
        CheckpointError: there is no such file, it is no GGUF file or one of another version or byte order, it ends too
            soon or is damaged, or it has a tensor in a format that is not read.
        MissingToolError: the package ``gguf`` is not there.
    """
    package = gguf_package()
    _check_magic(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Cursor(path, content).header(package)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        found = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise CheckpointError(f"{path} {found}: give a GGUF file, or a directory with config.json.") from None
    if start[:4] != MAGIC:
        if is_lfs_pointer(path):
            raise CheckpointError(fetch_it(path))
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {start[:4]!r} in place of {MAGIC!r}.")
    if len(start) < 8:
        raise CheckpointError(f"{path} ends within its head; download it again.")
    (version,), (swapped,) = struct.unpack("<I", start[4:]), struct.unpack(">I", start[4:])
    if version not in VERSIONS:
        if swapped in VERSIONS:
            raise CheckpointError(f"{path} is a big-endian GGUF file; use the little-endian one.")
        raise CheckpointError(
            f"{path} is of version {version} of GGUF; supported are {' and '.join(map(str, VERSIONS))}, so convert the "
            "model again."
        )


class _Cursor:
    """A place in a file that moves on with what is read."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.size = path, content, len(content)
        self.at = 8

    def header(self, package: Any) -> Header:
        num_tensors, num_keys = self.scalars("Q", 2)
        metadata: dict[str, Any] = {}
        for _ in range(self.count(num_keys, 13)):
            key = self.text()
            if key in metadata:
                self.refuse(f"has the key {key} twice")
            metadata[key] = self.value(self.scalars("I", 1)[0])
        alignment = metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self.refuse(f"has {reprlib.repr(alignment)} as {_ALIGNMENT}, which is no power of two")
        infos = [self.tensor_info() for _ in range(self.count(num_tensors, 24))]
        start = -(-self.at // alignment) * alignment
        tensors = tuple(self.stored(package, start, alignment, *info) for info in infos)
        if len({tensor.name for tensor in tensors}) < len(tensors):
            self.refuse("has two tensors of one name")
        return Header(self.path, metadata, tensors)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _FLOAT:
            return float(str(np.float32(self.scalars("f", 1)[0])))  # 1e-05, not its nearest float32 in all digits
        if kind in _SCALARS:
            return self.scalars(_SCALARS[kind], 1)[0]
        if kind != _ARRAY:
            self.refuse(f"has a value of the unknown type {kind}")
        (of,), (length,) = self.scalars("I", 1), self.scalars("Q", 1)
        if of == _STRING:
            return [self.text() for _ in range(self.count(length, 8))]
        if of not in _SCALARS:
            self.refuse(f"has an array of the unknown type {of}")
        return list(self.scalars(_SCALARS[of], self.count(length, struct.calcsize(f"<{_SCALARS[of]}"))))

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, (num_dims,) = self.text(), self.scalars("I", 1)
        if not 1 <= num_dims <= MAX_DIMS:
            self.refuse(f"has tensor {name} of {num_dims} dimensions")
        shape = tuple(reversed(self.scalars("Q", num_dims)))
        (kind,), (offset,) = self.scalars("I", 1), self.scalars("Q", 1)
        return name, shape, kind, offset

    def stored(
        self, package: Any, start: int, alignment: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> StoredTensor:
        try:
            format_ = package.GGMLQuantizationType(kind)
        except ValueError:
            format_ = None
        if format_ is None or format_.name not in (*PLAIN, *BLOCKS):
            what = f"the unknown format {kind}" if format_ is None else f"the format {format_.name}"
            raise CheckpointError(
                f"Tensor {name} in {self.path} has {what}; supported are {', '.join((*PLAIN, *BLOCKS))}, so use "
                "another quantization of the model."
            )
        block, block_bytes = package.GGML_QUANT_SIZES[format_]
        if not all(shape) or shape[-1] % block or offset % alignment:
            self.refuse(f"has tensor {name} of shape {list(shape)} at {offset}, which {format_.name} cannot have")
        num_bytes = math.prod(shape) // block * block_bytes
        if start + offset + num_bytes > self.size:
            raise CheckpointError(
                f"{self.path} ends within tensor {name}: it has {self.size} bytes and needs "
                f"{start + offset + num_bytes}; download it again."
            )
        return StoredTensor(self.path, name, shape, format_.name, start + offset, num_bytes, block, block_bytes)

    def scalars(self, spelling: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{spelling}"
        begin = self.skip(struct.calcsize(layout))
        return struct.unpack_from(layout, self.content, begin)

    def text(self) -> str:
        (length,) = self.scalars("Q", 1)
        begin = self.skip(length)
        try:
            return self.content[begin : self.at].decode("utf-8")
        except UnicodeDecodeError:
            self.refuse("has a text that is not UTF-8")

    def skip(self, length: int) -> int:
        begin = self.at
        if length > self.size - begin:
            raise CheckpointError(f"{self.path} ends within its head; download it again.")
        self.at += length
        return begin

    def count(self, number: int, minimum: int) -> int:
        """A number of things of at least ``minimum`` bytes each, that the rest of the file has room for."""
        if number * minimum > self.size - self.at:
            raise CheckpointError(f"{self.path} ends within its head; download it again.")
        return number

    def refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path} {what}; it is damaged, download it again.")
