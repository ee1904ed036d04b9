"""Checkpoints of the tiny models in 4 bits, each rounded in one way, written once and kept."""

from pathlib import Path

import torch
from torch import Tensor, nn

from kvforge.checkpoint.copy_files import copy_files
from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.common.staging import staging_directory
from kvforge.quantize import quantize_checkpoint
from kvforge.quantize.int4_checkpoint import write_int4
from kvforge.swiftkv import load_model
from plugins.packed_linear.int4 import GROUP_DEPTH, LARGEST_CODE, MIDDLE, Codes


def by_inputs(checkpoint: Path, output: Path) -> Path:
    """Return ``output``, the checkpoint by ``kvforge quantize --recipe int4``."""
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        quantize_checkpoint(checkpoint, output, "int4")
    return output


@torch.inference_mode()
def by_largest(checkpoint: Path, output: Path) -> Path:
    """Return ``output``, the checkpoint with every linear layer but the head rounded by ``round_by_largest``."""
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        opened = open_model(checkpoint)
        config = read_model_config(opened)
        layers = load_model(opened, config, torch.float32).model.layers
        linears = [(name, module) for name, module in layers.named_modules() if isinstance(module, nn.Linear)]
        codes = {f"model.layers.{name}.weight": round_by_largest(module.weight) for name, module in linears}
        with staging_directory(output) as staging:
            write_int4(opened, config, codes, staging)
            copy_files(checkpoint, staging)
    return output


def round_by_largest(weight: Tensor) -> Codes:
    """Round ``weight`` ``[N, K]``, K a multiple of 32, as quantizers do without a search or a calibration: each group
    of 32 inputs has 2/15 of its largest magnitude as its scale, and the nearest codes."""
    groups = weight.float().unflatten(1, (-1, GROUP_DEPTH))
    scales = (groups.abs().amax(2, keepdim=True) * (2 / LARGEST_CODE)).half().float()
    levels = (groups / scales).nan_to_num(0.0, 0.0, 0.0).round().clamp(-MIDDLE, LARGEST_CODE - MIDDLE)
    return Codes((levels + MIDDLE).to(torch.uint8).flatten(1), scales[..., 0])
