"""Checkpoints of KV predictors: an auxiliary model whose config.json says whose cache its maps predict."""

import reprlib
from pathlib import Path
from typing import Any

from kvforge.checkpoint.model import check_has_no_states, check_is_rewired, check_weights, open_model, read_model_config
from kvforge.checkpoint.reader import Checkpoint
from kvforge.common.errors import CheckpointError
from model_defs import ModelConfig, ModelError
from model_defs.prediction import MAPS, Prediction


def base_fields(base: ModelConfig) -> dict[str, Any]:
    """Return what a predictor's config.json says of the model whose cache it predicts."""
    names = ("model_type", "num_layers", "num_kv_heads", "head_dim", "vocab_size")
    return {name: getattr(base, name) for name in names}


def prediction_fields(prediction: Prediction) -> dict[str, Any]:
    """Return the entry ``kv_prediction`` of a predictor's config.json."""
    return {"layers": list(prediction.layers), "base": base_fields(prediction.base)}


def map_shapes(prediction: Prediction) -> dict[str, tuple[int, ...]]:
    """Return the maps' tensors, by name, with their shapes."""
    hidden, shapes = prediction.auxiliary.hidden_size, dict[str, tuple[int, ...]]()
    for owner in prediction.base.owners:
        rows = prediction.base.kv_dim_of(owner)
        for part in ("k_proj", "v_proj"):
            shapes[f"{MAPS}.{owner}.{part}.weight"] = (rows, hidden)
            shapes[f"{MAPS}.{owner}.{part}.bias"] = (rows,)
    return shapes


def open_predictor(path: str | Path, base: ModelConfig) -> tuple[Checkpoint, Prediction]:
    """Open a predictor for ``base``.

    Raises:
        CheckpointError: it cannot be read, is no predictor or another model's, or lacks a tensor.
    """
    checkpoint = open_model(path)
    found = checkpoint.hf_config.get(MAPS)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no KV predictor; make one with: kvforge predict train BASE {path} -o OUT.")
    layers, wanted = found.get("layers"), base_fields(base)
    said = found.get("base")
    said = said if isinstance(said, dict) else {}
    for name, value in wanted.items():
        if said.get(name) != value:
            raise CheckpointError(
                f"{path} predicts the cache of another model: its {name} is {reprlib.repr(said.get(name))}, and "
                f"{value} in the base model; make a predictor for this one."
            )
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise CheckpointError(
            f"{path}: {MAPS}.layers in config.json is not a list of layers; make the predictor again."
        )
    check_is_rewired(checkpoint)
    check_has_no_states(checkpoint)
    config = read_model_config(checkpoint)
    check_weights(checkpoint, config)
    try:
        prediction = Prediction(config, base, tuple(layers))
    except ModelError as error:
        raise CheckpointError(f"{path}: {error}") from None
    for name, shape in map_shapes(prediction).items():
        checkpoint.check(name, shape)
    return checkpoint, prediction
