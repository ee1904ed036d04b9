"""Random cases for tests of eviction: a tiny model, a rule with its parameters, a prompt and forced tokens."""

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvforge.checkpoint.scorer import write_scorer
from model_defs import ModelConfig
from tests.support.eviction.budgets import BUDGETS
from tests.support.eviction.calendar import WHEN, calendar
from tests.support.eviction.entries import Trace
from tests.support.eviction.oracle import run
from tests.support.eviction.rules import ALL, observed
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.rounding import config_of

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
_WITH_CUT = _SIZES | {"num_hidden_layers": 4}

PLAIN_MODELS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"family": "llama"},
    "llama-biases-mqa": _SIZES | {"family": "llama", "attention_bias": True, "num_key_value_heads": 1},
    "qwen3": _SIZES | {"family": "qwen3"},
    "qwen3-tied-mha": _SIZES | {"family": "qwen3", "tie_word_embeddings": True, "num_key_value_heads": 4},
}
CUT_MODELS: dict[str, dict[str, Any]] = {
    "llama-cut": _WITH_CUT | {"family": "llama", "cut": 2},
    "llama-across-biases": _WITH_CUT | {"family": "llama", "cut": 1, "group_size": 2, "attention_bias": True},
    "qwen3-across": _WITH_CUT | {"family": "qwen3", "cut": 2, "group_size": 2},
}
"""With SwiftKV's cut: for the rules that do not observe all queries."""


def write_model(name: str, path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Write a model's checkpoint to ``path`` and return what it holds. Queries are four times larger than a random
    model's, so that attention tells tokens apart; those of qwen3 are normed."""
    make_checkpoint(path, **(PLAIN_MODELS | CUT_MODELS)[name])
    weights = {key: tensor * 4 if ".q_proj" in key else tensor for key, tensor in load_weights(path).items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = config_of(path)
    scorer = random_scorer(config, 16 if "qwen3" in name else 0)
    (path / "kvzap").mkdir()
    write_scorer(path / "kvzap", config, 16 if "qwen3" in name else 0, scorer)
    return config, weights | {f"kvzap.{key}": tensor for key, tensor in scorer.items()}


def random_scorer(config: ModelConfig, units: int, seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of a scorer of KVzap by kvpress' names: linear, or with so many hidden units. Scores are about
    -2, give or take 1."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for index in range(config.num_owners):
        sizes = [config.hidden_size, *([units] if units else []), config.num_kv_heads]
        for layer, (columns, rows) in enumerate(itertools.pairwise(sizes)):
            name = f"layers.{index}" + (f".{2 * layer}" if units else "")
            strength = (1.5 if layer else 1.0) * columns**-0.5
            tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * strength
            is_last = layer == len(sizes) - 2
            tensors[f"{name}.bias"] = torch.randn(rows, generator=generator) * 0.1 - (2.0 if is_last else 0.0)
    return tensors


@dataclass(frozen=True)
class Case:
    """The name of a model, and the arguments of ``run``."""

    model: str
    rule: str
    budget: int
    block: int
    parameters: dict[str, int]
    prompt_ids: tuple[int, ...]
    forced_ids: tuple[int, ...]
    page_size: int = 4

    @property
    def calendar(self) -> list[tuple[int, int]]:
        """When it evicts, and what is kept."""
        num_prompt = len(self.prompt_ids)
        num_tokens = num_prompt + len(self.forced_ids)
        return calendar(self.rule, num_prompt, num_tokens, self.budget, self.block, **self.parameters)

    def trace(self, config: ModelConfig, weights: dict[str, Tensor], **cache: Any) -> Trace:
        """Return the oracle's, of this model; ``cache`` is ``kv_dtype`` and ``kv_scales``."""
        ids = self.prompt_ids, self.forced_ids
        more = {"page_size": self.page_size, **cache, **self.parameters}
        return run(config, weights, *ids, self.rule, self.budget, self.block, **more)


def random_case(seed: int, rule: str | None = None, with_cut: bool | None = None) -> Case:
    """Return a case of ``rule``, or of any: a prompt of 5 to 120 tokens, up to 32 more, a budget of 4 to 64, a block of
    1 to 16, and no more protected tokens than are kept. The model has a cut, or not, or where the rule allows it
    every second time."""
    pick = random.Random(seed)
    rule = rule or pick.choice(sorted(WHEN))
    budget = pick.choice((4, 5, 8, 13, 16, 31, 32, 64))
    block = pick.randint(1, min(16, budget // 2))
    parameters = _parameters(pick, rule, budget, budget - block)
    if with_cut is None:
        with_cut = observed(rule, parameters) != ALL and pick.random() < 0.5
    model = pick.choice(sorted(CUT_MODELS if with_cut else PLAIN_MODELS))
    prompt_ids, forced_ids = (
        tuple(pick.randrange(3, 320) for _ in range(pick.randint(*lengths))) for lengths in ((5, 120), (0, 32))
    )
    if rule == "fastgen":  # whose rule asks for special tokens, and punctuation
        prompt_ids = tuple(pick.choice((token, token, token, 1, 2, 49)) for token in prompt_ids)
    if rule == "kvzap":  # for which both are whole pages
        budget, block = pick.choice(((16, 4), (32, 8), (32, 16), (64, 16), (64, 4), (13, 3)))
        parameters["window"] = pick.randint(1, budget - block)
    sizes = [size for size in (1, 4, 16) if rule != "kvzap" or block % size == 0]
    page_size = pick.choice([size for size in sizes if rule not in BUDGETS or budget % size == 0])
    return Case(model, rule, budget, block, parameters, prompt_ids, forced_ids, page_size)


def _parameters(pick: random.Random, rule: str, budget: int, keep: int) -> dict[str, int]:
    """Return a rule's own parameters where ``keep`` of ``budget`` tokens are kept."""
    sinks = pick.randint(1, min(4, keep - 1))
    return {
        "streaming": {"sinks": sinks},
        "scissorhands": {"history": pick.choice((1, 7, 24, 400)), "recent": pick.randint(1, keep)},
        "snapkv": {"window": pick.randint(1, budget - 1), "kernel": pick.choice((1, 3, 5, 7))},
        "adakv": {
            "window": pick.randint(1, budget - 1),
            "kernel": pick.choice((1, 3, 5, 7)),
            "floor_percent": pick.choice((0, 20, 50, 100)),
        },
        "pyramid": {
            "window": pick.randint(1, budget - 1),
            "kernel": pick.choice((1, 3, 5, 7)),
            "beta": pick.choice((1, 2, 20)),
        },
        "simlayer": {
            "sinks": sinks,
            "recent": pick.randint(1, budget - sinks),
            "ceiling_percent": pick.choice((100, 150, 400)),
        },
        "kvzip": {
            "chunk": pick.choice((7, 30, 512)),
            "sinks": sinks,
            "ceiling_percent": pick.choice((100, 150, 400)),
        },
        "kvzap": {"threshold": pick.choice((0, 150, 200, 250, 600)), "ceiling_percent": pick.choice((100, 150, 400))},
        "fastgen": {
            "window": pick.choice((1, 7, 32)),
            "frequent": pick.randint(1, budget),
            "recent": pick.randint(1, budget),
            "recover_percent": pick.choice((20, 50, 80, 95, 100)),
            "ceiling_percent": pick.choice((100, 150, 400)),
        },
        "keydiff+adakv": {"floor_percent": pick.choice((0, 20, 50, 100))},
        "h2o+pyramid": {"beta": pick.choice((1, 2, 20))},
        "expected": {
            "window": pick.choice((1, 7, 64)),
            "future": pick.choice((1, 16, 100)),
            "sinks": sinks,
            "covariance": pick.randint(0, 1),
        },
        "squeeze": {
            "window": pick.randint(1, budget - 1),
            "kernel": pick.choice((1, 3, 5, 7)),
            "share_percent": pick.choice((1, 35, 100)),
            "similar": pick.choice((1, 7, 32)),
        },
        "keydiff+squeeze": {
            "share_percent": pick.choice((1, 35, 100)),
            "similar": pick.choice((1, 7, 32)),
            "ceiling_percent": pick.choice((100, 130, 400)),
        },
        "batchmax": {"decode_only": pick.randint(0, 1)},
        "roco": {"sinks": sinks, "spread": pick.randint(1, keep - sinks)},
    }.get(rule, {})
