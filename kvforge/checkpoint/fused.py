"""Tensors of a checkpoint that hold several modules of a model, one below the other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvforge.checkpoint.reader import Checkpoint, Part
from kvforge.common.errors import CheckpointError


def split_fused(checkpoint: Checkpoint, fused: Mapping[str, Sequence[tuple[str, int]]]) -> Checkpoint:
    """Return the checkpoint with each module of ``fused``, such as ``self_attn.qkv_proj``, as the modules in it, each
    with its number of rows. Modules that are stored one by one stay as they are.

    Raises:
        CheckpointError: a module is stored both by itself and within another.
    """
    files, parts = dict(checkpoint.file_of_tensor), dict(checkpoint.parts)
    for name in checkpoint.file_of_tensor:
        module, _, kind = name.rpartition(".")
        end = next((end for end in fused if module.endswith(f".{end}")), None)
        if end is None:
            continue
        prefix, start = module.removesuffix(end), 0
        total = sum(rows for _, rows in fused[end])
        for part, rows in fused[end]:
            _refuse_both(checkpoint, name, f"{prefix}{part}")
            weight = f"{prefix}{part}.{kind if kind == 'bias' else 'weight'}"
            parts[weight] = Part(f"{module}.{weight.rpartition('.')[2]}", start, start + rows, total)
            if kind in ("weight", "bias"):
                files[weight] = files[name]
            start += rows
        if kind in ("weight", "bias"):
            del files[name]
    return replace(checkpoint, file_of_tensor=files, parts=parts)


def _refuse_both(checkpoint: Checkpoint, name: str, module: str) -> None:
    for kind in ("weight", "bias"):
        if f"{module}.{kind}" in checkpoint.file_of_tensor:
            raise CheckpointError(
                f"Tensors {name} and {module}.{kind} in {checkpoint.path} are the same part of the model; "
                "remove the one that does not belong to it."
            )
