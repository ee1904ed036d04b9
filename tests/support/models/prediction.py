"""Small base models with predictors that are known to be right."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.checkpoint.predictor import prediction_fields
from model_defs.prediction import MAPS, Prediction
from tests.support.models.checkpoints import load_weights, make_checkpoint


def own_predictor(base: Path, path: Path) -> Path:
    """A predictor of ``base`` in ``path`` whose auxiliary model is the base itself and whose maps are its own W_k and
    W_v: it predicts the base's cache exactly."""
    shutil.copytree(base, path)
    config = read_model_config(open_model(base))
    weights = load_weights(base)
    for owner in config.owners:
        for part in ("k_proj", "v_proj"):
            source = f"model.layers.{owner}.self_attn.{part}"
            weight = weights[f"{source}.weight"]
            weights[f"{MAPS}.{owner}.{part}.weight"] = weight.clone()
            bias = weights.get(f"{source}.bias")
            weights[f"{MAPS}.{owner}.{part}.bias"] = weight.new_zeros(len(weight)) if bias is None else bias.clone()
    return _write(path, config_of(config, config, tuple(range(config.num_layers))), weights)


def random_predictor(path: Path, base: Path, *, layers: tuple[int, ...], seed: int = 7, **overrides) -> Path:
    """A random auxiliary model in ``path`` with random maps, of which owner i reads layer ``layers[i]``."""
    make_checkpoint(path, seed=seed, **overrides)
    auxiliary, config = (read_model_config(open_model(each)) for each in (path, base))
    weights, generator = load_weights(path), torch.Generator().manual_seed(seed)
    for owner in config.owners:
        for part in ("k_proj", "v_proj"):
            shape = (config.kv_dim, auxiliary.hidden_size)
            weights[f"{MAPS}.{owner}.{part}.weight"] = 0.1 * torch.randn(shape, generator=generator)
            weights[f"{MAPS}.{owner}.{part}.bias"] = 0.1 * torch.randn(shape[0], generator=generator)
    return _write(path, config_of(auxiliary, config, layers), weights)


def config_of(auxiliary, base, layers: tuple[int, ...]) -> dict:
    return prediction_fields(Prediction(auxiliary, base, layers))


def _write(path: Path, fields: dict, weights: dict[str, torch.Tensor]) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {MAPS: fields}))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
