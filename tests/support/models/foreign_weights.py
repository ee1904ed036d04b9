"""Weights as other libraries store them, recorded by ``tests.support.models.foreign_fixtures``."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from plugins.packed_linear.int4 import Codes, round_to_codes

FOREIGN = Path(__file__).resolve().parents[2] / "cpu" / "quantize" / "data" / "foreign.safetensors"


@dataclass(frozen=True)
class StoredWeight:
    """``quantization_config``, the parts of a weight, by what stands in place of ``weight``, and what the library that
    stored it makes of them, ``[N, K]`` in its dtype."""

    config: dict[str, Any]
    parts: dict[str, Tensor]
    expected: Tensor

    def write(self, folder: Path, **config: Any) -> Path:
        """Write a checkpoint with the weight as ``layer.weight``, some of its configuration replaced."""
        folder.mkdir()
        settings = {"model_type": "llama", "quantization_config": self.config | config}
        (folder / "config.json").write_text(json.dumps(settings))
        save_file({f"layer.{name}": part for name, part in self.parts.items()}, folder / "model.safetensors")
        return folder


@cache
def stored_weights() -> dict[str, StoredWeight]:
    """The recorded weights by name."""
    with safe_open(FOREIGN, "pt") as file:
        configs = json.loads(file.metadata()["configs"])
    tensors = load_file(FOREIGN)
    found = {}
    for name, config in configs.items():
        parts = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        expected = parts.pop("expected")
        found[name] = StoredWeight(config, parts, expected)
    return found


def quantize_checkpoint(path: Path, method: str, zero_points: bool) -> dict[str, Tensor]:
    """Store every projection of a checkpoint in groups of 32 as AWQ, GPTQ or compressed-tensors do; returns what a
    reader must see of each tensor, float32 where it is quantized."""
    seen, stored = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        stored[name] = seen[name] = tensor
        if "proj" in name and name.endswith("weight"):
            codes = round_to_codes(tensor, zero_points)
            codes = replace(codes, scales=codes.scales.half().float())
            seen[name] = codes.dequantize()
            del stored[name]
            stored |= {name.removesuffix("weight") + part: value for part, value in PARTS[method](codes).items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[method]}))
    return seen


def _words(numbers: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Numbers of 4 bits ``[R, C]`` in int32 words ``[R, C / 8]``: the lowest is the first of ``order``."""
    numbers = F.pad(numbers.int(), (0, -numbers.shape[1] % 8))
    words = [numbers[:, first::8] << 4 * place for place, first in enumerate(order)]
    return torch.stack(words).sum(0, dtype=torch.int32).contiguous()


def _awq(weight: Codes) -> dict[str, Tensor]:
    order, zeros = (0, 2, 4, 6, 1, 3, 5, 7), weight.with_zeros().zeros
    assert zeros is not None
    parts = {"qweight": _words(weight.codes.T, order), "qzeros": _words(zeros.T, order)}
    return parts | {"scales": weight.scales.half().T.contiguous()}


def _gptq(weight: Codes) -> dict[str, Tensor]:
    zeros = weight.with_zeros().zeros
    assert zeros is not None
    parts = {"qweight": _words(weight.codes).T.contiguous(), "qzeros": _words(zeros.T)}
    index = torch.arange(weight.shape[1]).int() // weight.group_depth
    bias = torch.zeros(weight.shape[0]).half()  # AutoGPTQ gives one to layers that have none
    return parts | {"scales": weight.scales.half().T.contiguous(), "g_idx": index, "bias": bias}


def _compressed(weight: Codes) -> dict[str, Tensor]:
    parts = {"weight_packed": _words(weight.codes), "weight_scale": weight.scales.half()}
    if weight.zeros is not None:
        parts["weight_zero_point"] = _words(weight.zeros.T).T.contiguous()
    return parts | {"weight_shape": torch.tensor(weight.shape)}


PARTS = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
"""The parts of a weight in 4 bits, by what stands in place of ``weight``."""
_W4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq_v2"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": _W4}
    },
}  # fmt: skip
"""``quantization_config`` of what ``quantize_checkpoint`` writes."""
