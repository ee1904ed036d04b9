"""Tensors that hold a projection of all experts of a layer, as a tensor for each of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from kvforge.checkpoint.layouts import TensorLayout, TensorLayouts
from kvforge.checkpoint.mxfp4 import BLOCK, QUANT_METHOD, dequantize_mxfp4
from kvforge.checkpoint.reader import Checkpoint
from kvforge.common.errors import CheckpointError
from plugins.packed_linear.int4 import Codes


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: its file, and its name there."""

    file: Path
    name: str
    layouts: TensorLayouts = field(compare=False, repr=False)

    @property
    def layout(self) -> TensorLayout:
        """That of the tensor there."""
        return self.layouts.of(self.file, self.name)


@dataclass(frozen=True)
class ExpertPiece:
    """The outputs ``part``, ``part + parts``, … of one expert in a tensor of ``num_experts``: a bias, a weight, or one
    in MXFP4 where there are ``scales``. With ``by_outputs`` it is a weight of which outputs are rows, and those of a
    part follow each other."""

    stored: Place
    num_experts: int
    expert: int
    part: int
    parts: int
    is_bias: bool = False
    by_outputs: bool = False
    scales: Place | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that it is read from."""
        return (self.stored.file,) if self.scales is None else (self.stored.file, self.scales.file)

    def layout(self) -> TensorLayout:
        """Return shape and dtype of the tensor.

        Raises:
            CheckpointError: what is stored has another number of dimensions or of experts, or scales that do not fit.
        """
        shape, dtype = self.stored.layout
        if self.is_bias:
            self._check(shape, 2)
            return (len(range(self.part, shape[1], self.parts)),), dtype
        if self.by_outputs:
            self._check(shape, 3)
            return (shape[1] // self.parts, shape[2]), dtype
        if self.scales is None:
            self._check(shape, 3)
            return (len(range(self.part, shape[2], self.parts)), shape[1]), dtype
        self._check(shape, 4)
        if shape[3] != BLOCK // 2 or dtype != "U8" or self.scales.layout != (shape[:3], "U8"):
            raise CheckpointError(
                f"Tensors {self.stored.name} and {self.scales.name} in {self.stored.file} are no weights in MXFP4; "
                "download them again."
            )
        return (len(range(self.part, shape[1], self.parts)), shape[2] * BLOCK), "BF16"

    @property
    def is_quantized(self) -> bool:
        """False: MXFP4 is a way to store bfloat16."""
        return False

    @property
    def has_codes(self) -> bool:
        """False: no int4 engine keeps what is stored."""
        return False

    def codes(self) -> Codes | None:
        """Return None."""
        return None

    def read(self, rows: tuple[int, int] | None = None) -> Tensor:
        """Return the tensor, dequantized where it is in MXFP4, or its ``rows``. Raises as ``layout`` does."""
        whole = self._read()
        return whole if rows is None else whole[rows[0] : rows[1]]

    def _read(self) -> Tensor:
        self.layout()
        with safe_open(self.stored.file, framework="pt") as file:
            own: Tensor = file.get_slice(self.stored.name)[self.expert]
        if self.by_outputs:
            return own.chunk(self.parts)[self.part].contiguous()
        if self.scales is None:
            own = own[..., self.part :: self.parts]
            return own.contiguous() if self.is_bias else own.T.contiguous()
        with safe_open(self.scales.file, framework="pt") as file:
            scales: Tensor = file.get_slice(self.scales.name)[self.expert]
        return dequantize_mxfp4(own[self.part :: self.parts], scales[self.part :: self.parts])

    def _check(self, shape: tuple[int, ...], dims: int) -> None:
        if len(shape) != dims or shape[0] != self.num_experts:
            raise CheckpointError(
                f"Tensor {self.stored.name} in {self.stored.file} has shape {list(shape)}; it must have {dims} "
                f"dimensions, the first of the {self.num_experts} experts of config.json."
            )


def unstack_experts(
    checkpoint: Checkpoint, stacked: Sequence[tuple[str, Sequence[str]]], num_experts: int, by_outputs: bool = False
) -> Checkpoint:
    """Return the checkpoint with each tensor of ``stacked``, such as ``mlp.experts.gate_up_proj``, as those of each
    expert; what is stored expert by expert stays as it is. ``by_outputs`` as in a family's ``stacked_by_outputs``.

    Raises:
        CheckpointError: a tensor is stored both ways, or in MXFP4 without its scales.
    """
    files, pieces = dict(checkpoint.file_of_tensor), dict(checkpoint.pieces)
    kinds = ("",) if by_outputs else ("", "_bias", "_blocks")
    endings = {f".{tensor}{kind}": (parts, kind) for tensor, parts in stacked for kind in kinds}
    for name in checkpoint.file_of_tensor:
        ending = next((ending for ending in endings if name.endswith(ending)), None)
        if ending is None:
            continue
        parts, kind = endings[ending]
        whole = name.removesuffix(kind)
        scales = _place(checkpoint, f"{whole}_scales") if kind == "_blocks" else None
        for expert in range(num_experts):
            for part, projection in enumerate(parts):
                module = f"{whole.rpartition('.')[0]}.{expert}.{projection}"
                new = f"{module}.{'bias' if kind == '_bias' else 'weight'}"
                if new in files:
                    raise CheckpointError(
                        f"Tensors {name} and {new} in {checkpoint.path} are the same part of the model; remove the one "
                        "that does not belong to it."
                    )
                stored = _place(checkpoint, name)
                files[new] = stored.file
                is_bias, count = kind == "_bias", len(parts)
                pieces[new] = ExpertPiece(stored, num_experts, expert, part, count, is_bias, by_outputs, scales)
        for read in (name, f"{whole}_scales") if scales is not None else (name,):
            del files[read]
    hf = checkpoint.hf_config
    if is_mxfp4(checkpoint):
        hf = {key: value for key, value in hf.items() if key != "quantization_config"}  # what is read is not in it
    return replace(checkpoint, hf_config=hf, file_of_tensor=files, pieces=pieces)


def is_mxfp4(checkpoint: Checkpoint) -> bool:
    """Whether config.json says that weights of experts are in MXFP4."""
    stated = checkpoint.hf_config.get("quantization_config")
    return isinstance(stated, Mapping) and stated.get("quant_method") == QUANT_METHOD


def _place(checkpoint: Checkpoint, name: str) -> Place:
    if name not in checkpoint.file_of_tensor:
        raise CheckpointError(f"Tensor {name} is missing from {checkpoint.path}; the checkpoint is incomplete.")
    return Place(checkpoint.file_of_tensor[name], checkpoint.stored_names.get(name, name), checkpoint.layouts)
