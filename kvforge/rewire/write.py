"""The files of a rewired checkpoint that are its own: weights and config.json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from kvforge.checkpoint.safetensors_writer import TensorSpec
from kvforge.checkpoint.sharded_writer import write_sharded
from kvforge.rewire.initialise import New
from kvforge.rewire.options import RewireOptions
from kvforge.rewire.source import Source
from model_defs import ModelConfig

ARCHITECTURES = {
    "llama": "LlamaSwiftKVForCausalLM",
    "mistral": "MistralSwiftKVForCausalLM",
    "qwen2": "Qwen2SwiftKVForCausalLM",
    "qwen3": "Qwen3SwiftKVForCausalLM",
}


def write_weights(
    source: Source,
    config: ModelConfig,
    new: New,
    options: RewireOptions,
    directory: Path,
    progress: Callable[[str, int, int], object],
) -> int:
    """Write the source's tensors, less the teacher's where it is dropped, and the new ones; returns their bytes."""
    dropped = _teacher_only(source, config) if options.drop_teacher else set()
    specs = [spec for name, spec in source.specs.items() if name not in dropped] + [spec for spec, _ in new.values()]
    done = 0

    def produce(spec: TensorSpec) -> Tensor:
        nonlocal done
        progress("writing", done, len(specs))
        done += 1
        return new[spec.name][1]() if spec.name in new else source.checkpoint.read_raw(spec.name)

    size = write_sharded(directory, specs, produce, options.max_shard_bytes)
    progress("writing", done, len(specs))
    return size


def _teacher_only(source: Source, config: ModelConfig) -> set[str]:
    """Return the names that the student has no use for: q, k and v as the layers above the cut had them."""
    parts = ("q_proj.", "k_proj.", "v_proj.", "q_norm.", "k_norm.")
    prefixes = tuple(
        f"model.layers.{layer}.self_attn.{part}" for layer in range(config.cut, config.num_layers) for part in parts
    )
    return {name for name in source.specs if name.startswith(prefixes)}


def write_config(source: Source, config: ModelConfig, directory: Path) -> None:
    """Write the source's config.json with the cut, the groups and the early exit."""
    hf: dict[str, Any] = dict(source.checkpoint.hf_config)
    hf |= {
        "architectures": [ARCHITECTURES[config.model_type]],
        "model_type": f"{config.model_type}_swiftkv",
        "swiftkv": True,
        "num_key_value_layers": config.cut,
        "key_value_group_size": config.group_size,
    }
    if config.early_exit:
        hf["early_exit"] = True
    (directory / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
