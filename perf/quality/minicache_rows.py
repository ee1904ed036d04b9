"""The rows of ``perf.quality.minicache``: what of the tiny teacher's upper half is merged or shared, and how."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kvforge.checkpoint.model import open_model
from kvforge.rewire.minicache import INTERPOLATION, RETENTION
from kvforge.swiftkv import SwiftKVForCausalLM, load_model
from model_defs import ModelConfig, load_config
from perf.harness.engines import TEACHER_DIR
from perf.quality.cached_model import CachedModel, MergedPairs
from perf.quality.swiftkv_students import student_of
from perf.quality.swiftkv_variants import Variant

FIRST_MERGED = 4
"""MiniCache begins in the middle of the layers, as the paper does, and where the students are cut."""
INITS = ("copy", "mean", "fold", "ridge", "minicache")
TRAINED_INITS = ("copy", "mean", "ridge", "minicache")
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Row:
    """A model to measure: the teacher, with ``merged`` its layers' caches merged, or the student ``variant``."""

    name: str
    slug: str
    merged: tuple[float, float, bool] | None = None
    """MiniCache's interpolation and retention, and whether vectors are averaged instead."""
    variant: Variant | None = None

    @property
    def is_trained(self) -> bool:
        """Whether it is a distilled student."""
        return self.variant is not None and self.variant.is_trained

    def model(self, work: Path, steps: int) -> SwiftKVForCausalLM:
        """Return the model in float32, rewired and distilled if that is not done yet."""
        path = TEACHER_DIR if self.variant is None else student_of(self.variant, work, steps)
        checkpoint = open_model(path)
        return load_model(checkpoint, load_config(checkpoint.hf_config), torch.float32)

    def cached(self, model: SwiftKVForCausalLM) -> CachedModel:
        """Return the model with an empty cache."""
        return (
            CachedModel(model) if self.merged is None else CachedModel(model, MergedPairs(FIRST_MERGED, *self.merged))
        )


def bytes_per_token(config: ModelConfig, row: Row, retained: float) -> float:
    """Return what a token's K and V take in bfloat16, mean over tokens.

    A merged pair keeps a direction and two lengths; a retained one keeps both vectors and a number of 4 bytes that says
    which it is.
    """
    vector, vectors = 2 * config.head_dim, 2 * config.num_kv_heads
    layers = len(config.owners)
    if row.merged is None:
        return layers * vectors * vector
    num_pairs = (layers - FIRST_MERGED) // 2
    lengths = 0 if row.merged[2] else 2 * 2
    pair = vector + lengths + retained * (vector + 4)
    return (layers - 2 * num_pairs) * vectors * vector + num_pairs * vectors * pair


def _merged(name: str, interpolation: float = INTERPOLATION, retention: float = RETENTION) -> Row:
    return Row(name, f"merged-{interpolation:g}-{retention:g}", (interpolation, retention, False))


def _shared(init: str, seed: int | None = None) -> Row:
    variant = Variant(f"cut 4, 2-way, {init}", 4, 2, init, seed is not None, seed=seed or 1)
    ending = "not distilled" if seed is None else f"distilled, seed {seed}"
    return Row(f"AcrossKV, `{init}`, {ending}", variant.slug, variant=variant)


TEACHER = Row("no cut, own caches", "teacher")
MINICACHE = _merged("MiniCache, t 0.6, gamma 0.05")
MERGED = (
    MINICACHE, _merged("MiniCache, gamma 0", retention=0.0), _merged("MiniCache, t 0.5", 0.5),
    _merged("MiniCache, t 0.4", 0.4), _merged("MiniCache, t 0.8", 0.8),
    _merged("MiniCache, t 1: the lower layer's direction", 1.0), _merged("MiniCache, gamma 0.5", retention=0.5),
    Row("mean of each pair", "averaged", (0.5, 0.0, True)),
)  # fmt: skip
UNTRAINED = tuple(map(_shared, INITS))
TRAINED = {init: tuple(map(partial(_shared, init), SEEDS)) for init in TRAINED_INITS}
ROWS = (TEACHER, *MERGED, *UNTRAINED, *(row for seed in zip(*TRAINED.values(), strict=True) for row in seed))
