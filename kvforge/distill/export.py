"""The distilled checkpoint: trained weights from the run, all others as the source has them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.copy_files import copy_files
from kvforge.checkpoint.safetensors_writer import DTYPES, TensorSpec
from kvforge.checkpoint.sharded_writer import write_sharded
from kvforge.common.staging import staging_directory
from model_defs.weights import is_teacher_only

MAX_SHARD_BYTES = 5_000_000_000


def export_checkpoint(
    source: Checkpoint,
    output: Path,
    shapes: Mapping[str, Sequence[int]],
    trained: Mapping[str, Tensor],
    cut: int,
    *,
    keep_teacher: bool = False,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Write ``output``, whole or not at all, with the source's configuration, tokenizer and other files.

    ``shapes`` names the model's tensors. Those in ``trained`` are written from there, the others copied from
    ``source``; each in ``dtype``, or by default as the source has it, and an added early-exit head as the embedding.
    The q, k and v projections that layers from ``cut`` on had before are left out unless ``keep_teacher``. What is at
    ``output`` is replaced if ``overwrite``.

    Raises:
        KvforgeError: ``output`` exists and may not be replaced, or cannot be written.
    """

    def stored(name: str) -> torch.dtype:
        if dtype is not None:
            return dtype
        known = name if name in source.file_of_tensor else "model.embed_tokens.weight"
        return DTYPES[source.dtype(known)]

    def produce(spec: TensorSpec) -> Tensor:
        if spec.name in trained:
            return trained[spec.name].to(spec.dtype)
        return source.read(spec.name, spec.shape, spec.dtype)

    specs = [
        TensorSpec(name, tuple(shape), stored(name))
        for name, shape in shapes.items()
        if keep_teacher or not is_teacher_only(name, cut)
    ]
    hf_config = dict(source.hf_config)
    if any("_early_exit." in name for name in shapes):
        hf_config["early_exit"] = True
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
        hf_config[key] = str(dtype).removeprefix("torch.")
    with staging_directory(output, replace=overwrite) as staging:
        (staging / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")
        copy_files(source.folder, staging)
        write_sharded(staging, specs, produce, MAX_SHARD_BYTES)
