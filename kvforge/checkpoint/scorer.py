"""Checkpoints of scorers: kvpress' KVzapModel, as ``save_pretrained`` writes it and NVIDIA publishes it."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvforge.checkpoint.reader import Checkpoint, open_directory
from kvforge.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from kvforge.common.checkpoint_files import CONFIG, WEIGHTS
from kvforge.common.errors import CheckpointError
from model_defs import ModelConfig
from model_defs.token_scores import scorer_specs

MODEL_TYPE = "kvzap"
FOLDER = "kvzap"
"""Where a checkpoint has its own scorer."""
MIN_UNITS, MAX_UNITS = 16, 2**16
"""Of a hidden layer: compiling takes fewer numbers for constants of the code."""


def config_fields(model: ModelConfig, units: int) -> dict[str, int | None]:
    """Return what config.json says of a scorer for ``model``; ``cut`` is our own field, above which scorers read what
    enters it, and is left out without one."""
    return {
        "input_dim": model.hidden_size,
        "output_dim": model.num_kv_heads,
        "hidden_dim": units or None,
        "n_modules": model.num_owners,
        "cut": model.cut if model.is_swiftkv else None,
    }


def with_scorer(model: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Return ``model`` with the scorer that is in ``checkpoint``.

    Raises:
        CheckpointError: it is no scorer, another model's, or lacks a tensor or has one that it should not.
    """
    found, path = checkpoint.hf_config, checkpoint.path
    if found.get("model_type") != MODEL_TYPE:
        raise CheckpointError(
            f"{path} is no scorer of KVzap: its model_type is {found.get('model_type')!r}; train one with kvforge "
            "predict scorer, or give one of kvpress."
        )
    units = found.get("hidden_dim") or 0
    if type(units) is not int or not (units == 0 or MIN_UNITS <= units <= MAX_UNITS):
        raise CheckpointError(
            f"{path}: hidden_dim is {units!r}; give a scorer with {MIN_UNITS} to {MAX_UNITS} hidden units, or null."
        )
    for name, value in config_fields(model, units).items():
        if name != "hidden_dim" and found.get(name) != value:
            raise CheckpointError(
                f"{path} scores the tokens of another model: its {name} is {found.get(name)!r}, and {value} in this "
                "one (n_modules: its layers with a cache of their own); train one for it with kvforge predict scorer."
            )
    model = dataclasses.replace(model, kv_scorer=units)
    sources = {source.name: source.shape for spec in scorer_specs(model) for source in spec.sources}
    for name, shape in sources.items():
        checkpoint.check(name, shape)
    if unknown := sorted(set(checkpoint.file_of_tensor) - set(sources)):
        raise CheckpointError(f"{path} has {unknown[0]}, which no scorer of KVzap has; give one that is whole.")
    return model


def open_scorer(path: str | Path, model: ModelConfig) -> tuple[Checkpoint, ModelConfig]:
    """Open the scorer in the directory ``path``, and return ``model`` with it. Raises CheckpointError as
    ``open_directory`` and ``with_scorer`` do."""
    checkpoint = open_directory(Path(path))
    return checkpoint, with_scorer(model, checkpoint)


def write_scorer(directory: Path, model: ModelConfig, units: int, weights: Mapping[str, Tensor]) -> None:
    """Write a scorer's ``weights``, by kvpress' names, float32, into the folder ``directory``."""
    specs = [TensorSpec(name, tuple(tensor.shape), torch.float32) for name, tensor in weights.items()]
    write_safetensors(directory / WEIGHTS, specs, lambda spec: weights[spec.name].detach().cpu().contiguous())
    fields = {"architectures": ["KVzapModel"], "model_type": MODEL_TYPE, "dtype": "float32"}
    sizes = {name: value for name, value in config_fields(model, units).items() if name != "cut" or value is not None}
    text = json.dumps({**fields, **sizes}, indent=2)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")
