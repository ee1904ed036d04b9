"""The ONNX files of a claim, with random weights."""

from collections.abc import Sequence
from pathlib import Path

import torch

from kvforge.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from kvforge.compiler.build import num_positions
from kvforge.compiler.convert import ROPE_TABLES
from kvforge.compiler.onnx_export import write_onnx
from model_defs.weights import weight_specs
from tests.support.tensorrt.claims import Claim


def export(claim: Claim, folder: Path, graphs: Sequence[str]) -> None:
    """Write `weights.safetensors` and `<graph>.onnx` of each of `graphs` into `folder`."""
    options, weights = claim.options, folder / "weights.safetensors"
    specs = [TensorSpec(spec.name, tuple(spec.shape), options.torch_dtype) for spec in weight_specs(claim.config)]
    generator = torch.Generator().manual_seed(0)
    positions = num_positions(options)
    specs += [
        TensorSpec(name, (positions, claim.config.head_dim // 2), torch.float32) for name in ROPE_TABLES[:positions]
    ]
    write_safetensors(weights, specs, lambda spec: torch.randn(spec.shape, generator=generator).to(spec.dtype))
    for graph in graphs:
        write_onnx(graph, claim.config, options, folder / f"{graph}.onnx", weights)
