"""Weights in 4 or 8 bits that are rounded by what a calibration text makes of their inputs.

The model's graphs run once over all of the text. When the text comes to a linear layer, its inputs say how its weight
is rounded (GPTQ, arXiv 2210.17323), and it goes on through the rounded one. So a layer is rounded by what the rounded
layers before it give.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvforge.common.errors import CheckpointError
from kvforge.compiler.cpu_graph import AnyLinear, dtype_of_packed, is_rotated, packed_tensors, stack_packed
from kvforge.compiler.layer_pass import LayerPass, Progress, Read
from kvforge.compiler.options import ResolvedOptions
from model_defs import ModelConfig
from plugins.packed_linear import rotated_rows
from plugins.packed_linear.by_inputs import round_by_inputs, round_to_bytes_by_inputs, round_to_codes_by_inputs
from plugins.packed_linear.int4 import Codes
from plugins.packed_linear.int4_steps import SteppedCodes
from plugins.packed_linear.int8 import ByteCodes
from plugins.packed_linear.packing import IN_STEPS, WITH_ZEROS


def round_by_text(
    config: ModelConfig,
    options: ResolvedOptions,
    read: Read,
    samples: Sequence[Sequence[int]],
    progress: Progress = lambda done, total: None,
) -> dict[str, dict[str, Tensor]]:
    """Return the packed tensors of every linear layer of an engine with ``options`` by the layer's name.

    ``samples`` are as ``LayerPass.run`` takes them. Experts that no token came to are rounded to the nearest.
    ``progress`` is called with the weights that are rounded and all of them. Raises CheckpointError where a layer's
    inputs are not finite.
    """
    rounding = _Rounding(config, options, read, progress)
    rounding.run(samples)
    return rounding.packed


class _Rounding(LayerPass):
    """What is found while the text runs: ``packed``, of each layer that it came to."""

    def __init__(self, config: ModelConfig, options: ResolvedOptions, read: Read, progress: Progress) -> None:
        super().__init__(config, options, read, progress)
        self.packed: dict[str, dict[str, Tensor]] = {}
        self._parts: list[dict[str, Tensor]] = []

    def visit(self, name: str, weight: Tensor, layer: AnyLinear, rows: Tensor) -> Tensor:
        """Round the weight; returns what is left of it."""
        packed_dtype = self.options.packed_dtype_of(name)
        assert packed_dtype is not None
        if not len(rows):
            self._parts.append(packed_tensors(weight, layer, packed_dtype))
            return weight
        rotated, moments = is_rotated(layer, packed_dtype), moments_of(name, rows)
        if rotated:  # the rotation is symmetric
            weight, moments = rotated_rows(weight), rotated_rows(rotated_rows(moments).T)
        codes = rounded_by(weight, moments, dtype_of_packed(layer, packed_dtype))
        self._parts.append(packed_tensors(codes, layer, packed_dtype))
        left = codes.dequantize()
        return rotated_rows(left) if rotated else left

    def finish(self, name: str) -> None:
        """Keep what was found of the layer's matrices, of experts as one."""
        self.packed[name] = self._parts[0] if len(self._parts) == 1 else stack_packed(self._parts, len(self._parts))
        self._parts = []


def moments_of(name: str, rows: Tensor) -> Tensor:
    """Return the sum of x xᵀ over inputs x ``[T, K]`` of the layer ``name``; raises CheckpointError where they are not
    finite."""
    moments = rows.T @ rows
    if not moments.diagonal().isfinite().all():
        raise CheckpointError(
            f"The calibration text makes inputs of {name} that are not finite; correct the checkpoint, or give "
            "--calibration none."
        )
    return moments


def rounded_by(weight: Tensor, moments: Tensor, dtype: torch.dtype) -> ByteCodes | Codes | SteppedCodes:
    """Return ``weight`` ``[N, K]`` rounded as it is packed in ``dtype``, given the sum of x xᵀ over its inputs x."""
    if dtype == torch.int8:
        return round_to_bytes_by_inputs(weight, moments)
    if dtype == IN_STEPS:
        return round_by_inputs(weight, moments)
    return round_to_codes_by_inputs(weight, moments, dtype == WITH_ZEROS)
