"""Weights of an ONNX graph as references into the engine's one safetensors file."""

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
from torch import Tensor

from kvforge.common.errors import BuildError
from kvforge.compiler.convert import FREQUENCIES

_DTYPES = {"F32": ir.DataType.FLOAT, "BF16": ir.DataType.BFLOAT16, "F16": ir.DataType.FLOAT16}


def external_tensors(path: Path) -> dict[str, ir.ExternalTensor]:
    """Return every tensor of a safetensors file by name, as a reference of that file name, offset and length."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = ir.ExternalTensor(
            path.name,
            8 + header_bytes + begin,
            end - begin,
            _DTYPES[entry["dtype"]],
            shape=ir.Shape(entry["shape"]),
            name=name,
            base_dir=str(path.parent),
        )
    return tensors


def use_external_weights(model: ir.Model, weights: Path, frequencies: Tensor) -> None:
    """Let every weight of ``model`` refer to ``weights``; the exported values are never read.

    Raises:
        BuildError: an initializer is neither a weight of the file, of its shape and dtype, nor a constant of the
            model's definition: an integer, a scalar or the RoPE frequencies.
    """
    tensors = external_tensors(weights)
    for name, value in model.graph.initializers.items():
        given = value.const_value
        assert given is not None
        if name in tensors and name != FREQUENCIES:
            if given.dtype != tensors[name].dtype or given.shape != tensors[name].shape:
                raise BuildError(
                    f"Weight {name} is {given.dtype} {given.shape} in the graph {model.graph.name} and "
                    f"{tensors[name].dtype} {tensors[name].shape} in {weights}."
                )
            value.const_value = tensors[name]
        elif given.dtype.is_floating_point() and given.size > 1:
            folded = np.asarray(given.numpy(), dtype=np.float32).reshape(-1)
            if not np.array_equal(folded, frequencies.numpy()):
                raise BuildError(f"Graph {model.graph.name} has the constant {name}, which was computed from weights.")
