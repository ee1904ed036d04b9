"""Outliers where real models have them, in a checkpoint of Llama's family whose function stays as it is."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

CHANNELS = (5, 77, 130)
"""Of the stream, that norms make large."""
CHANNEL_SIZE = 30.0
"""How many times as large a channel behind a norm becomes."""
HEAD_SIZES = tuple(8.0 * 2 ** (quarter / 4) for quarter in (0, 1, -1, -2))
"""The same of a number of a head's keys or values: an octave around 8, over which a float takes every mantissa."""
PAIR, VALUE = 2, 3
"""The rotary pair of each head's keys and the number of each head's values."""


def with_outliers(checkpoint: Path, path: Path, head_size: float = HEAD_SIZES[0]) -> Path:
    """Write the model of ``checkpoint``, in one safetensors file, to ``path`` with outliers. Channels behind each norm
    are larger and their weights smaller, a rotary pair of keys larger and of queries smaller, and a value larger and
    its weights behind attention smaller, so that logits differ by rounding in float32 alone."""
    shutil.copytree(checkpoint, path)
    config = json.loads((path / "config.json").read_text()) | {"torch_dtype": "float32", "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    for layer in range(config["num_hidden_layers"]):
        _enlarge_channels(weights, f"model.layers.{layer}.")
        _enlarge_heads(weights, f"model.layers.{layer}.self_attn.", config, head_size)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _enlarge_channels(weights: dict[str, Tensor], layer: str) -> None:
    behind = {
        "input_layernorm": [f"self_attn.{part}_proj" for part in "qkv"],
        "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
    }
    for norm, readers in behind.items():
        weights[f"{layer}{norm}.weight"][list(CHANNELS)] *= CHANNEL_SIZE
        for reader in readers:
            weights[f"{layer}{reader}.weight"][:, list(CHANNELS)] /= CHANNEL_SIZE


def _enlarge_heads(weights: dict[str, Tensor], attention: str, config: dict[str, int], size: float) -> None:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    pair = [PAIR, PAIR + dim // 2]
    queries, keys, values = (
        weights[f"{attention}{part}_proj.weight"].view(count, dim, -1)
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    keys[:, pair] *= size
    queries[:, pair] /= size
    values[:, VALUE] *= size
    weights[f"{attention}o_proj.weight"].view(-1, heads, dim)[:, :, VALUE] /= size
