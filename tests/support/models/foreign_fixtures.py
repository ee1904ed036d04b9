"""Records weights as other libraries store them, with what each makes of them, in an environment that has them.

    python -m tests.support.models.foreign_fixtures

compressed-tensors, AutoAWQ and AutoGPTQ pack one random weight each in several ways. Of the last two, single modules
are loaded from their files, as their packages need older versions of transformers. Writes ``FOREIGN``
(tests/support/models/foreign_weights.py): tensors ``<case>.<part>`` and ``<case>.expected``, and in the metadata each
case's ``quantization_config`` and the versions.
"""

import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.models.foreign_weights import FOREIGN

OUTPUTS, DEPTH = 24, 256
Case = tuple[dict[str, Any], dict[str, Tensor], Tensor]
"""``quantization_config``, the parts of the weight and the weight that the library makes of them."""


def random_weight(outputs: int = OUTPUTS, depth: int = DEPTH) -> Tensor:
    weight = torch.randn(outputs, depth, generator=torch.Generator().manual_seed(outputs + depth)) / 16
    return weight + 0.02  # not symmetric


def compressed(depth: int = DEPTH, **weights: Any) -> Case:
    """By compressed-tensors' own observer's formula, compressor and decompressor."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = random_weight(depth=depth)
    if args.strategy == "block":
        rows, columns = args.block_structure
        groups = weight.view(OUTPUTS // rows, rows, depth // columns, columns).transpose(1, 2).flatten(2)
    elif args.strategy == "tensor":
        groups = weight.view(1, 1, -1)
    else:
        groups = weight.view(OUTPUTS, -1, args.group_size or depth)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    if args.strategy == "tensor":
        scale, zero = scale.flatten(), zero.flatten()
    parts = {"weight": weight, "weight_scale": scale.bfloat16().float(), "weight_zero_point": zero}
    stored_as = "pack-quantized" if args.num_bits == 4 else f"{args.type}-quantized"
    compressor = BaseCompressor.get_value_from_registry(stored_as)
    stored = compressor.compress(parts, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
    config = {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": {"group_0": group}}
    return config, {name: part.contiguous() for name, part in stored.items()}, expected


def module_of(name: str, path: str) -> ModuleType:
    """A module of an installed package from its file, without the package's own imports."""
    folder = next(Path(entry) for entry in sys.path if (Path(entry) / path).is_file())
    spec = importlib.util.spec_from_file_location(name, folder / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def integers(weight: Tensor, group_size: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales, float16 as the libraries keep them, and zero points, 1 to 15, of groups: ``[N, groups]``."""
    groups = weight.view(len(weight), -1, group_size)
    if symmetric:
        scales = groups.abs().amax(-1) / 7.5
        return scales.half(), torch.full_like(scales, 8)
    scales = (groups.amax(-1) - groups.amin(-1)) / 14
    return scales.half(), (-groups.amin(-1) / scales).round().clamp(1, 15)


def gptq(group_size: int, symmetric: bool, order: Tensor | None = None) -> Case:
    module = module_of("qlinear_cuda", "auto_gptq/nn_modules/qlinear/qlinear_cuda.py")
    weight = random_weight(32)
    scales, zeros = integers(weight, group_size, symmetric)
    linear = nn.Linear(DEPTH, 32, bias=False).half()
    linear.weight.data = weight.half()
    layer = module.QuantLinear(4, group_size, DEPTH, 32, bias=False, weight_dtype=torch.float16)
    layer.pack(linear, scales, zeros.clone(), order)
    expected = layer(torch.eye(DEPTH).half()).T
    names = ("qweight", "qzeros", "scales", "g_idx")
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": order is not None,
    }
    return config, {name: getattr(layer, name).contiguous() for name in names}, expected


def awq(group_size: int) -> Case:
    sys.modules.setdefault("awq.utils.module", ModuleType("awq.utils.module"))
    packing = module_of("packing_utils", "awq/utils/packing_utils.py")
    weight = random_weight(32)
    scales, zeros = integers(weight, group_size, False)
    spread = [x.float().repeat_interleave(group_size, 1) for x in (scales, zeros)]
    values = (weight / spread[0] + spread[1]).round().clamp(0, 15).int()

    def words(numbers: Tensor) -> Tensor:
        """As ``WQLinear_GEMM.from_linear`` packs them, which cannot be imported without its kernels."""
        packed = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int32)
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            packed |= numbers[:, output::8] << 4 * place
        return packed

    parts = {"qweight": words(values.T), "qzeros": words(zeros.int().T), "scales": scales.T.contiguous()}
    expected = packing.dequantize_gemm(*(parts[name] for name in ("qweight", "qzeros", "scales")), 4, group_size)
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return config, parts, expected.T


def main() -> None:
    shuffled = (torch.randperm(DEPTH, generator=torch.Generator().manual_seed(0)) // 64).int()
    int4 = {"num_bits": 4, "type": "int"}
    cases = {
        "w4a16": compressed(**int4, symmetric=True, strategy="group", group_size=128),
        "w4a16 asymmetric": compressed(**int4, symmetric=False, strategy="group", group_size=32),
        "w4a16 channel": compressed(100, **int4, symmetric=True, strategy="channel"),
        "w8a8": compressed(num_bits=8, type="int", symmetric=True, strategy="channel"),
        "fp8 channel": compressed(num_bits=8, type="float", symmetric=True, strategy="channel"),
        "fp8 tensor": compressed(num_bits=8, type="float", symmetric=True, strategy="tensor"),
        "fp8 block": compressed(num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[8, 64]),
        "gptq": gptq(128, True),
        "gptq asymmetric": gptq(64, False),
        "gptq act order": gptq(64, True, shuffled),
        "awq": awq(128),
    }
    tensors, configs = {}, {}
    for name, (config, parts, expected) in cases.items():
        configs[name] = config
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        tensors[f"{name}.expected"] = expected.contiguous()
    versions = {package: version(package) for package in ("compressed-tensors", "autoawq", "auto-gptq", "torch")}
    FOREIGN.parent.mkdir(exist_ok=True)
    save_file(tensors, FOREIGN, {"configs": json.dumps(configs), "versions": json.dumps(versions)})


if __name__ == "__main__":
    main()
