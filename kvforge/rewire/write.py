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
from kvforge.rewire.source import PlainCheckpoint
from model_defs import ModelConfig, families
from model_defs.hf_config import BLIND
from model_defs.weights import is_teacher_only


def write_weights(
    source: PlainCheckpoint,
    config: ModelConfig,
    new: New,
    options: RewireOptions,
    directory: Path,
    progress: Callable[[str, int, int], object],
) -> int:
    """Write the source's tensors, less the teacher's where it is dropped, and the new ones; returns their bytes."""
    specs = [
        spec for name, spec in source.specs.items() if not (options.drop_teacher and is_teacher_only(name, config.cut))
    ] + [spec for spec, _ in new.values()]
    done = 0

    def produce(spec: TensorSpec) -> Tensor:
        nonlocal done
        progress("writing", done, len(specs))
        done += 1
        return new[spec.name][1]() if spec.name in new else source.checkpoint.read_raw(spec.name)

    size = write_sharded(directory, specs, produce, options.max_shard_bytes)
    progress("writing", done, len(specs))
    return size


def write_config(source: PlainCheckpoint, config: ModelConfig, directory: Path) -> None:
    """Write the source's config.json with the cut, the groups and the early exit."""
    hf: dict[str, Any] = dict(source.checkpoint.hf_config)
    hf |= {
        "architectures": [families()[config.model_type].swiftkv_architecture],
        "model_type": f"{config.model_type}_swiftkv",
        "swiftkv": True,
        "num_key_value_layers": config.cut,
        "key_value_group_size": config.group_size,
    }
    if config.is_blind:
        hf |= {"cut_kind": BLIND, "num_anchor_tokens": config.num_anchors}
    if config.early_exit:
        hf["early_exit"] = True
    (directory / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
