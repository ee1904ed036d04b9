"""Writing weights in 4 bits as compressed-tensors' ``pack-quantized`` has them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.safetensors_writer import DTYPES, TensorSpec
from kvforge.checkpoint.sharded_writer import write_sharded
from model_defs import ModelConfig
from model_defs.weights import is_teacher_only
from plugins.packed_linear.int4 import Codes

MAX_SHARD_BYTES = 5 << 30


def write_int4(checkpoint: Checkpoint, config: ModelConfig, codes: Mapping[str, Codes], directory: Path) -> int:
    """Write config.json and the weights of ``checkpoint``, those of ``codes`` in 4 bits, without the projections that
    a rewired checkpoint keeps of its teacher; returns the weights' bytes."""
    parts = {name: _parts(weight) for name, weight in codes.items()}
    packed = {name.removesuffix("weight") + part: x for name, of in parts.items() for part, x in of.items()}
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in packed.items()]
    for name in checkpoint.file_of_tensor:
        if name not in codes and not is_teacher_only(name, config.cut):
            shape, dtype = checkpoint.layout(name)
            specs.append(TensorSpec(name, shape, DTYPES[dtype]))

    def produce(spec: TensorSpec) -> Tensor:
        return packed[spec.name] if spec.name in packed else checkpoint.read_raw(spec.name)

    hf: dict[str, Any] = {**checkpoint.hf_config, "quantization_config": _config(codes)}
    (directory / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
    return write_sharded(directory, sorted(specs, key=lambda spec: spec.name), produce, MAX_SHARD_BYTES)


def _parts(weight: Codes) -> dict[str, Tensor]:
    """Codes in int32 words of 8, the first the lowest."""
    numbers = F.pad(weight.codes, (0, -weight.shape[1] % 8))
    stored = (numbers[:, 0::2] | numbers[:, 1::2] << 4).contiguous()
    return {
        "weight_packed": stored.view(torch.int32),
        "weight_scale": weight.scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }


def _config(codes: Mapping[str, Codes]) -> dict[str, Any]:
    depth = next(iter(codes.values())).group_depth
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": depth}
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
