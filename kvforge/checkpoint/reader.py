"""A checkpoint directory: ``config.json`` and one or more safetensors files, read lazily."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvforge.checkpoint.finite import check_finite
from kvforge.checkpoint.formats import WeightFormat
from kvforge.checkpoint.layouts import TensorLayout, TensorLayouts
from kvforge.checkpoint.quantization import Quantization, read_quantization
from kvforge.checkpoint.side_folder import SideFolder
from kvforge.common.checkpoint_files import CONFIG, QUANTIZATION, WEIGHTS, WEIGHTS_INDEX, tokenizer_files
from kvforge.common.errors import CheckpointError, first_line
from kvforge.common.json_files import read_json
from kvforge.common.lfs import fetch_it, is_lfs_pointer
from kvforge.common.relative_names import is_inside
from plugins.packed_linear.int4 import Codes
from plugins.packed_linear.int4_steps import are_steps


@dataclass(frozen=True)
class Part:
    """A tensor that is rows ``start`` to ``stop`` of the tensor ``whole``, which has ``total``."""

    whole: str
    start: int
    stop: int
    total: int


class DerivedTensor(Protocol):
    """A tensor that is made of what is stored."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that it is read from."""
        ...

    def layout(self) -> TensorLayout:
        """Return its shape and dtype."""
        ...

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored as integers with scales."""
        ...

    @property
    def has_codes(self) -> bool:
        """Whether ``codes`` returns any; reads no values."""
        ...

    def read(self, rows: tuple[int, int] | None = None) -> Tensor:
        """Return it, or its ``rows`` (first, end)."""
        ...

    def codes(self) -> Codes | None:
        """Return a weight in 4 bits as int4 engines keep it, where it is stored so."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: ``hf_config`` is config.json, ``generation_config`` generation_config.json (empty
    where there is none), ``file_of_tensor`` says where each tensor lies, ``quantization`` how it was quantized,
    ``stored_names`` what a renamed tensor is called there, ``parts`` which tensors are rows of a stored one.
    ``pieces`` are tensors that are made of stored ones. ``is_text_part`` says that the files have more: a model for
    images or audio. ``path`` is a directory, or a file that holds all of it: then ``side_folder`` has what lies in a
    directory beside the weights. ``layouts`` is shared with the checkpoints that are made of this one."""

    path: Path
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    file_of_tensor: Mapping[str, Path]
    quantization: Quantization | None = None
    stored_names: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)
    pieces: Mapping[str, DerivedTensor] = field(default_factory=dict)
    is_text_part: bool = False
    side_folder: SideFolder | None = None
    layouts: TensorLayouts = field(default_factory=TensorLayouts, compare=False, repr=False)

    @property
    def folder(self) -> Path:
        """The directory with the tokenizer and the other files beside the weights. Raises CheckpointError where a file
        holds a tokenizer that is not supported."""
        return self.path if self.side_folder is None else self.side_folder.path

    def renamed(self, rename: Callable[[str], str]) -> "Checkpoint":
        """Return the checkpoint with each tensor under the name that ``rename`` makes of its own.

        Raises:
            CheckpointError: two tensors would have the same name.
        """
        stored_names: dict[str, str] = {}
        for name in self.file_of_tensor:
            if (other := stored_names.setdefault(rename(name), name)) != name:
                raise CheckpointError(
                    f"Tensors {other} and {name} in {self.path} are the same part of the model; "
                    "remove the one that does not belong to it."
                )
        files = {name: self.file_of_tensor[before] for name, before in stored_names.items()}
        pieces = {name: self.pieces[before] for name, before in stored_names.items() if before in self.pieces}
        stored_names = {name: self.stored_names.get(before, before) for name, before in stored_names.items()}
        return replace(self, file_of_tensor=files, stored_names=stored_names, pieces=pieces)

    def layout(self, name: str) -> TensorLayout:
        """Return shape and stored dtype of tensor ``name``."""
        if (piece := self._piece(name)) is not None:
            shape, dtype = piece.layout()
            return self._part_shape(name, shape), dtype
        shape, dtype = self.layouts.of(self._file(name), self._stored_name(name))
        return self._part_shape(name, shape), dtype

    def _stored_name(self, name: str) -> str:
        whole = self.whole(name)
        return self.stored_names.get(whole, whole)

    def _piece(self, name: str) -> DerivedTensor | None:
        """What makes ``name`` or the tensor that it is part of, if it is not stored as it is."""
        return self.pieces.get(self.whole(name))

    def whole(self, name: str) -> str:
        """Return the name of the tensor that ``name`` is part of, or its own."""
        return self.parts[name].whole if name in self.parts else name

    def _part_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of ``name`` where its whole has ``shape``."""
        part = self.parts.get(name)
        if part is None:
            return shape
        if shape[:1] != (part.total,):
            raise CheckpointError(
                f"Tensor {self._stored_name(name)} in {self.path} has shape {list(shape)}, but config.json asks for "
                f"{part.total} rows; config and weights do not belong together."
            )
        return (part.stop - part.start, *shape[1:])

    def _rows(self, name: str, whole: Tensor) -> Tensor:
        """What ``name`` is of its whole."""
        part = self.parts.get(name)
        return whole if part is None else whole[part.start : part.stop]

    def has(self, name: str) -> bool:
        """Whether tensor ``name`` is stored, as it is or in a format of its own."""
        return name in self.file_of_tensor or self.is_in_format(name)

    def is_in_format(self, name: str) -> bool:
        """Whether another library's format stores weight ``name`` as integers."""
        return self._format_of(name) is not None

    def dtype(self, name: str) -> str:
        """Return the stored dtype of tensor ``name`` in safetensors' spelling, e.g. ``BF16``; ``F16`` for a weight that
        a file or another library's format stores as integers."""
        piece = self._piece(name)
        is_quantized = self._format_of(name) is not None if piece is None else piece.is_quantized
        return "F16" if is_quantized else self.layout(name)[1]

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check that tensor ``name`` is there with ``shape``, without reading its data.

        Raises:
            CheckpointError: the tensor is missing, has another shape, or is neither floating point nor a weight that
                the checkpoint's quantization stores in another way.
        """
        stored = self._format_of(name)
        if stored is not None:
            found, dtype = self._part_shape(name, stored.shape(self, self.whole(name))), "F16"
        else:
            found, dtype = self.layout(name)
        if found != tuple(shape):
            raise CheckpointError(
                f"Tensor {name} in {self.path} has shape {list(found)}, but config.json "
                f"asks for {list(shape)}; config and weights do not belong together."
            )
        if dtype == "F8_E4M3" and self.quantization is not None and self.quantization.weight_algo is not None:
            if (scale := f"{self.whole(name)}_scale") not in self.file_of_tensor:
                raise CheckpointError(
                    f"Tensor {self.whole(name)} in {self.path} is FP8 and has no {scale}; the export is incomplete."
                )
        elif dtype not in ("BF16", "F16", "F32", "F64"):
            raise CheckpointError(
                f"Tensor {name} in {self.path} has dtype {dtype}; quantized checkpoints of "
                "this kind are not supported, use a bf16, fp16 or fp32 one."
            )

    def read(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        rows: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return tensor ``name`` in ``dtype``, by default as it is stored; a quantized weight is dequantized in fp32.
        With ``rows`` (first, end) only those are returned.

        Raises CheckpointError as :meth:`check` does, for an element that is not finite in ``dtype``, and for a scale
        that is not positive and finite or has not one value for the tensor or for each of its rows.
        """
        self.check(name, shape)
        stored = self._format_of(name)
        if rows is not None and stored is None:
            return self._part_of(name, rows, shape[0]).read(name, (rows[1] - rows[0], *shape[1:]), dtype)
        if stored is not None:
            start, stop = rows or (0, shape[0])
            first = self.parts[name].start if name in self.parts else 0
            tensor = stored.dequantize(self, self.whole(name), slice(first + start, first + stop))
        else:
            tensor = self.read_raw(name, finite=False)
        if tensor.dtype == torch.float8_e4m3fn:
            tensor = self._scaled(tensor, name)
        tensor = tensor.to(dtype or tensor.dtype)
        check_finite(tensor, name, self.path)
        return tensor

    def _part_of(self, name: str, rows: tuple[int, int], total: int) -> "Checkpoint":
        """The checkpoint with a tensor that is only these rows of itself."""
        part = self.parts.get(name, Part(name, 0, total, total))
        own = replace(part, start=part.start + rows[0], stop=part.start + rows[1])
        return replace(self, parts={**self.parts, name: own})

    def codes(self, name: str) -> Codes | None:
        """Return weight ``name`` in 4 bits, as int4 engines keep it, where the checkpoint stores it so; else None."""
        stored, piece = self._format_of(name), self._piece(name)
        codes = None if stored is None else stored.codes(self, self.whole(name))
        codes = codes if piece is None else piece.codes()
        if codes is None or name not in self.parts:
            return codes
        return codes.rows(torch.arange(self.parts[name].start, self.parts[name].stop), None)

    def has_codes(self, name: str) -> bool:
        """Whether ``codes`` returns any; reads no values."""
        piece = self._piece(name)
        return self._format_of_codes(name) is not None if piece is None else piece.has_codes

    def has_zero_points(self, name: str) -> bool:
        """Whether weight ``name`` has codes with zero points; reads no values."""
        stored = self._format_of_codes(name)
        return stored is not None and not stored.has_middle_zeros(self, self.whole(name))

    def has_steps(self, name: str) -> bool:
        """Whether weight ``name`` has codes without zero points whose scales are whole steps; reads no values."""
        stored, whole = self._format_of_codes(name), self.whole(name)
        return stored is not None and stored.has_middle_zeros(self, whole) and are_steps(stored.scales(self, whole))

    def _format_of_codes(self, name: str) -> WeightFormat | None:
        """What stores weight ``name`` in codes that an int4 engine keeps, if anything does."""
        stored = self._format_of(name)
        return stored if stored is not None and stored.keeps_codes(self, self.whole(name)) else None

    def _format_of(self, name: str) -> WeightFormat | None:
        """What stores weight ``name`` in a way of its own, if anything does."""
        stored = self.quantization.weight_format if self.quantization is not None else None
        is_held = stored is not None and name.endswith(".weight") and stored.holds(self, self.whole(name))
        return stored if is_held else None

    def _scaled(self, tensor: Tensor, name: str) -> Tensor:
        scale = self.read_raw(f"{self.whole(name)}_scale", finite=False).float()
        scale = self._rows(name, scale) if scale.numel() > 1 else scale
        largest = torch.finfo(torch.float32).max / torch.finfo(torch.float8_e4m3fn).max
        if scale.numel() not in (1, len(tensor)) or not bool(((scale > 0) & (scale <= largest)).all()):
            raise CheckpointError(
                f"{name}_scale in {self.path} must hold one positive number for the tensor or for each of its "
                f"{len(tensor)} rows; export the checkpoint again."
            )
        return tensor.float() * scale.view(-1, *(1,) * (tensor.dim() - 1))

    def read_raw(self, name: str, finite: bool = True) -> Tensor:
        """Return tensor ``name`` as it is stored; raises CheckpointError when it is missing, torch has not its dtype,
        or an element is not ``finite``."""
        file = self._file(name)
        try:
            tensor = self._stored(file, name)
        except (SafetensorError, AttributeError) as error:
            raise CheckpointError(
                f"Tensor {name} in {self.path} cannot be read ({first_line(error)}); export the checkpoint again."
            ) from None
        if finite:
            check_finite(tensor, name, self.path)
        return tensor

    def _stored(self, path: Path, name: str) -> Tensor:
        if (piece := self._piece(name)) is not None:
            rows = self.parts.get(name)
            return piece.read() if rows is None else piece.read((rows.start, rows.stop))
        with safe_open(path, framework="pt") as file:
            stored, part = self._stored_name(name), self.parts.get(name)
            tensor: Tensor = file.get_tensor(stored) if part is None else file.get_slice(stored)[part.start : part.stop]
        return tensor

    def files(self) -> list[Path]:
        """Return the files that make the model: configs, tokenizer and weights, sorted."""
        files = set(self.file_of_tensor.values())
        files |= {file for piece in self.pieces.values() for file in piece.files}
        if self.side_folder is not None:
            return sorted(files)
        files |= {self.path / CONFIG}
        files |= {self.path / name for name in tokenizer_files(self.path)}
        files |= {self.path / QUANTIZATION} if (self.path / QUANTIZATION).is_file() else set()
        return sorted(files)

    def sha256(self) -> str:
        """Return a hash over configs, tokenizer and weights, independent of the directory's name."""
        digest = hashlib.sha256()
        for file in self.files():
            digest.update(file.name.encode() + b"\0")
            with file.open("rb") as stream:
                while block := stream.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()

    def _file(self, name: str) -> Path:
        if name not in self.file_of_tensor:
            raise CheckpointError(
                f"Tensor {name} is missing from {self.path}; the checkpoint is incomplete or not "
                f"a {self.hf_config.get('model_type')} model."
            )
        return self.file_of_tensor[name]


def open_directory(path: Path) -> Checkpoint:
    """Open a Hugging Face-format directory with ``config.json`` and safetensors weights, sharded or not.

    Raises:
        CheckpointError: not such a directory, a file in it is damaged or missing, or its quantization is not
            supported.
    """
    if not (path / CONFIG).is_file():
        found = "is not a checkpoint" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {found}: give a directory with config.json and *.safetensors, or a GGUF file.")
    hf_config = read_json(path / CONFIG)
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    quant_file = path / QUANTIZATION
    quantization = read_quantization(path, hf_config, read_json(quant_file) if quant_file.is_file() else None)
    file_of_tensor: dict[str, Path] = {}
    for file in _weight_files(path):
        if not file.is_file():
            raise CheckpointError(f"Weight shard {file} is listed in the index but missing; download it again.")
        try:
            with safe_open(file, framework="pt") as tensors:
                names = list(tensors.keys())
        except (SafetensorError, OSError) as error:
            if is_lfs_pointer(file):
                raise CheckpointError(fetch_it(file)) from None
            raise CheckpointError(f"{file} is not a readable safetensors file: {first_line(error)}.") from None
        for name in names:
            if name in file_of_tensor:
                raise CheckpointError(
                    f"Tensor {name} is in both {file_of_tensor[name].name} and {file.name} of {path}; "
                    "remove the file that does not belong to the model."
                )
            file_of_tensor[name] = file
    return Checkpoint(path, hf_config, generation_config, file_of_tensor, quantization)


def _weight_files(path: Path) -> list[Path]:
    """Return the files that hold the weights, sorted: ``model.safetensors``, else the shards of its index, else
    every safetensors file. transformers looks in the same order."""
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    index = path / WEIGHTS_INDEX
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path} has no *.safetensors weights; convert the checkpoint to safetensors first.")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names; download it again.")
    for name in weight_map.values():
        if not is_inside(name):
            raise CheckpointError(
                f"{index} names the file {name!r}, which is not in the checkpoint; download it again."
            )
    return sorted({path / name for name in weight_map.values()})
