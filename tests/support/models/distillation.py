"""Small rewired models with their teacher, and data to distil them on."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvforge.checkpoint.model import open_model
from kvforge.distill import DistillConfig
from kvforge.distill.data import pack_samples
from kvforge.distill.learning_schedule import learning_rate
from kvforge.distill.packing import DataSettings, PackedData
from kvforge.distill.samples import Sample
from kvforge.swiftkv import SwiftKVForCausalLM, load_model
from model_defs import load_config
from tests.support.models.checkpoints import load_weights, make_checkpoint


def rewired_checkpoint(
    path: Path, family: str = "llama", cut: int = 2, group_size: int = 2, early_exit: bool = False, **options
) -> Path:
    """A checkpoint in ``path`` with the teacher's projections and students near them, as after rewiring."""
    make_checkpoint(path, family, **options)
    hf = json.loads((path / "config.json").read_text())
    hf |= {
        "swiftkv": True,
        "num_key_value_layers": cut,
        "key_value_group_size": group_size,
        "model_type": hf["model_type"] + "_swiftkv",
        "early_exit": early_exit,
    }
    (path / "config.json").write_text(json.dumps(hf))
    weights = load_weights(path)
    gain = weights.get(f"model.layers.{cut}.input_layernorm.weight")
    new = {} if gain is None else {"model.norm_swiftkv.weight": gain.clone()}
    for name, tensor in weights.items():
        parts = name.split(".")
        if parts[1] != "layers" or int(parts[2]) < cut or parts[3] != "self_attn" or parts[4][0] not in "qkv":
            continue
        if parts[4][0] == "q" or (int(parts[2]) - cut) % group_size == 0:
            new[".".join([*parts[:4], f"{parts[4]}_swiftkv", *parts[5:]])] = tensor.clone()
    if early_exit:
        new["model.norm_early_exit.weight"] = weights["model.norm.weight"].clone()
        new["lm_head_early_exit.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights | new, path / "model.safetensors", metadata={"format": "pt"})
    return path


def load_with_teacher(path: Path, dtype: torch.dtype = torch.float32) -> SwiftKVForCausalLM:
    checkpoint = open_model(path)
    return load_model(checkpoint, load_config(checkpoint.hf_config), dtype, with_teacher=True)


def random_data(length: int = 32, num_samples: int = 40, seed: int = 0, vocab_size: int = 320) -> PackedData:
    """Samples of 4 to ``length`` tokens whose second half are targets of uneven weight."""
    generator = np.random.default_rng(seed)
    samples = []
    for size in generator.integers(4, length + 1, num_samples):
        weights = np.where(np.arange(size) >= size // 2, generator.uniform(0.5, 2.0, size), 0)
        samples.append(Sample(generator.integers(3, vocab_size, size).astype(np.int32), weights.astype(np.float32)))
    return pack_samples(samples, DataSettings(length))[0]


def largest_updates(config: DistillConfig, steps: int) -> list[float]:
    """The farthest that AdamW moves a weight in each step, whatever the gradients are, without its decay.

    Step t moves by rate * m / (sqrt(v) + eps), where m and v are weighted means of t gradients and of their squares.
    By Cauchy and Schwarz |m| / sqrt(v) is at most the root of the sum of (weight in m)^2 / (weight in v).
    """
    first, second = config.betas
    moves = []
    for step in range(1, steps + 1):
        in_mean = [(1 - first) * first**age / (1 - first**step) for age in range(step)]
        in_square = [(1 - second) * second**age / (1 - second**step) for age in range(step)]
        ratio = math.sqrt(sum(a * a / b for a, b in zip(in_mean, in_square, strict=True)))
        moves.append(learning_rate(config, step - 1, steps) * ratio)
    return moves


def assert_trained_alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], config: DistillConfig) -> None:
    """Two trainings that differ by rounding alone have the same weights, but for those whose gradient nearly vanished.

    A step divides each gradient by its own size. Where the gradient of a weight is a thousandth of the others', its
    rounding error, which is as large as theirs, may turn the whole update: so no weight may be farther off than two
    updates in opposite directions in every step. Elsewhere the updates agree to a hundredth. A gradient sums over
    hundreds of tokens, which rounds by 3e-5 of its terms; to be within a factor of a hundred of that in one of 5 steps
    is the lot of a weight in a hundred.
    """
    assert found.keys() == expected.keys()
    moves = largest_updates(config, config.max_steps)
    for name, tensor in expected.items():
        off = (found[name] - tensor).abs()
        assert off.max() <= 2 * sum(moves), name
        assert (off > 0.01 * config.lr).sum() <= math.ceil(off.numel() / 100), name
