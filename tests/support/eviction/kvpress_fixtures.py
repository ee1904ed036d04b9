"""Records what kvpress keeps of some prompts: ``python -m tests.support.eviction.kvpress_fixtures``, run in the root of
the repository by the Python of an environment that has kvpress (0.5.5 needs NumPy 2 and transformers below 5.3)."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.support.eviction.kvpress import Case, Recipe, Run, save_case, weights_sha256
from tests.support.models.checkpoints import make_checkpoint

PRESSES = {
    "snapkv": kvpress.SnapKVPress,
    "tova": kvpress.TOVAPress,
    "keydiff": kvpress.KeyDiffPress,
    "streaming": kvpress.StreamingLLMPress,
    "observed": kvpress.ObservedAttentionPress,
    "pyramid": kvpress.PyramidKVPress,
    "expected": kvpress.ExpectedAttentionPress,
    "simlayer": kvpress.SimLayerKVPress,
    "kvzip": kvpress.KVzipPress,
}
WRAPPERS = {
    "keydiff-blocks": (kvpress.BlockPress, "block_size", "keydiff"),
    "adakv-snapkv": (kvpress.AdaKVPress, "alpha_safeguard", "snapkv"),
    "adakv-keydiff": (kvpress.AdaKVPress, "alpha_safeguard", "keydiff"),
}
"""Presses around another one: the class, its own parameter, the inner press."""


@dataclass(frozen=True)
class Plan:
    """A case to record: ``num_queries`` last queries are kept in the fixture; a run is a press and its parameters."""

    name: str
    seed: int
    num_tokens: int
    num_queries: int
    runs: list[tuple[str, dict[str, Any]]]
    overrides: dict[str, Any] = field(default_factory=lambda: {"num_attention_heads": 8})


def at(ratios: tuple[float, ...], press: str, **parameters: Any) -> list[tuple[str, dict[str, Any]]]:
    """A press at several compression ratios."""
    return [(press, {"compression_ratio": ratio} | parameters) for ratio in ratios]


PLANS = [
    Plan(
        "short",
        seed=6,
        num_tokens=60,
        num_queries=60,
        runs=[
            *at((0.25, 0.4, 0.6), "snapkv", window_size=32, kernel_size=5),
            *at((0.5, 0.7), "snapkv", window_size=16, kernel_size=7),
            *at((0.25, 0.5, 0.9), "tova"),
            *at((0.25, 0.5, 0.9), "keydiff"),
            *at((0.25, 0.5, 0.9), "streaming", n_sink=4),
            *at((0.25, 0.5, 0.75), "observed"),
            *at((0.25, 0.5, 0.75), "expected", n_future_positions=512, n_sink=4, use_covariance=True, epsilon=0.0),
            *at((0.5,), "expected", n_future_positions=512, n_sink=4, use_covariance=False, epsilon=0.02),
            *at((0.5,), "adakv-snapkv", alpha_safeguard=0.2, window_size=8, kernel_size=5),
            *at((0.5, 0.75), "adakv-keydiff", alpha_safeguard=0.2),
            *at((0.5,), "adakv-keydiff", alpha_safeguard=0.9),
            *at((0.25, 0.5), "kvzip", n_sink=4, layerwise=False),
            *at((0.5,), "kvzip", n_sink=4, layerwise=True),
        ],
    ),
    Plan(
        "three-kv-heads",
        seed=3,
        num_tokens=125,
        num_queries=32,
        overrides={
            "hidden_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
        },
        runs=[
            *at((0.3, 0.5, 0.7), "snapkv", window_size=32, kernel_size=5),
            *at((0.3, 0.5, 0.7), "tova"),
            *at((0.3, 0.5, 0.7), "keydiff"),
            *at((0.6,), "keydiff-blocks", block_size=25),
            *at((0.3, 0.7), "streaming", n_sink=2),
            *at((0.4, 0.5, 0.7), "pyramid", window_size=32, kernel_size=5, beta=20),
            *at((0.7,), "pyramid", window_size=8, kernel_size=5, beta=3),
            *at((0.5,), "adakv-snapkv", alpha_safeguard=0.2, window_size=16, kernel_size=5),
            *at((0.3,), "kvzip", n_sink=4, layerwise=False),
            *[("simlayer", {"lazy_threshold": t, "n_last": 1, "n_recent": 40, "n_initial": 4}) for t in (0.337, 0.345)],
        ],
    ),
    Plan(
        "long",
        seed=18,
        num_tokens=200,
        num_queries=64,
        runs=[
            *at((0.25, 0.5, 0.65), "snapkv", window_size=64, kernel_size=5),
            *at((0.25, 0.5, 0.8), "tova"),
            *at((0.25, 0.5, 0.8), "keydiff"),
            *at((0.6,), "keydiff-blocks", block_size=24),
            *at((0.5, 0.9), "streaming", n_sink=4),
            *at((0.4, 0.5, 0.65), "pyramid", window_size=64, kernel_size=5, beta=20),
            *at((0.75,), "pyramid", window_size=16, kernel_size=5, beta=2),
            *[("simlayer", {"lazy_threshold": t, "n_last": 1, "n_recent": 64, "n_initial": 4}) for t in (0.336, 0.345)],
            *at((0.5,), "kvzip", n_sink=4, layerwise=False),
        ],
    ),
]


def make_press(press: str, parameters: dict[str, Any]) -> kvpress.BasePress:
    if press not in WRAPPERS:
        return PRESSES[press](**parameters)
    wrapper, own, inner = WRAPPERS[press]
    return wrapper(PRESSES[inner](**{k: v for k, v in parameters.items() if k != own}), **{own: parameters[own]})


@contextmanager
def scores_of(press: kvpress.BasePress) -> Iterator[list[Tensor]]:
    """Collect a layer's scores ``[kv_heads, tokens]`` each time that they are computed."""
    collected: list[Tensor] = []
    if isinstance(press, kvpress.KVzipPress):
        decide = press.compress_post

        def after_deciding(model: LlamaForCausalLM) -> None:
            decide(model)
            collected.extend(press.score_val[:, 0].clone())

        press.compress_post = after_deciding
    elif not isinstance(press, (kvpress.SimLayerKVPress, kvpress.BlockPress)):
        scorer = getattr(press, "press", press)
        score = scorer.score

        def scored(*args: Any, **kwargs: Any) -> Tensor:
            scores = score(*args, **kwargs)
            collected.append(scores[0].clone())
            return scores

        scorer.score = scored
    yield collected


@contextmanager
def kept_by(press: kvpress.BasePress) -> Iterator[list[Tensor]]:
    """Collect which of a layer's keys, bool ``[kv_heads, tokens]``, a press leaves in the cache.

    Keys are compared with those that the press was given, bit for bit: other kernels of attention give other bits.
    """
    collected: list[Tensor] = []
    compress = press.compress

    def compressed(module: torch.nn.Module, hidden: Tensor, keys: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        left, values = compress(module, hidden, keys, *rest)
        same = (left[0, :, :, None] == keys[0, :, None]).all(-1)
        assert (same.sum(-1) == 1).all(), "a key that was kept is not one of the prompt's"
        collected.append(same.any(1))
        return left, values

    press.compress = compressed
    yield collected


def unmasked(model: LlamaForCausalLM, num_tokens: int) -> list[Tensor]:
    """Return what a press that only marks keys left unmarked: bool ``[kv_heads, tokens]`` of each layer."""
    layers = []
    for layer in model.model.layers:
        _, heads, positions = layer.self_attn.masked_key_indices
        kept = torch.ones(model.config.num_key_value_heads, num_tokens, dtype=torch.bool)
        kept[heads, positions] = False
        layers.append(kept)
    return layers


def prefill(model: LlamaForCausalLM, ids: Tensor) -> DynamicCache:
    cache = DynamicCache()
    model.model(input_ids=ids, past_key_values=cache)
    return cache


def rotated_queries(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return ``[layers, heads, tokens, head_dim]``."""
    queries: list[Tensor] = []

    def collect(module: torch.nn.Module, _: Any, kwargs: dict[str, Any], __: Any) -> None:
        q = module.q_proj(kwargs["hidden_states"]).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        queries.append(apply_rotary_pos_emb(q, q, *kwargs["position_embeddings"])[0][0])

    hooks = [layer.self_attn.register_forward_hook(collect, with_kwargs=True) for layer in model.model.layers]
    prefill(model, ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(queries)


def record_run(model: LlamaForCausalLM, ids: Tensor, press: str, parameters: dict[str, Any]) -> Run:
    model.set_attn_implementation("eager" if press == "observed" else "sdpa")
    made = make_press(press, parameters)
    with scores_of(made) as scores, kept_by(made) as kept, made(model):
        prefill(model, ids)
    if isinstance(made, (kvpress.AdaKVPress, kvpress.KVzipPress)):
        kept = unmasked(model, ids.shape[1])
    return Run(press, parameters, torch.stack(kept), torch.stack(scores) if scores else None)


@torch.no_grad()
def record(plan: Plan) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder), seed=plan.seed, **plan.overrides)
        model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
        generator = torch.Generator().manual_seed(plan.seed)
        ids = torch.randint(3, model.config.vocab_size, (1, plan.num_tokens), generator=generator)
        cache = prefill(model, ids)
        keys = torch.stack([layer.keys[0] for layer in cache.layers])
        recipe = Recipe(
            plan.seed,
            plan.overrides,
            weights_sha256(checkpoint),
            ids[0].tolist(),
            {package: version(package) for package in ("kvpress", "transformers", "torch", "numpy")},
        )
        return Case(
            plan.name,
            recipe,
            keys,
            rotated_queries(model, ids)[:, :, -plan.num_queries :].contiguous(),
            torch.stack([layer.values[0].norm(dim=-1) for layer in cache.layers]),
            tuple(record_run(model, ids, *run) for run in plan.runs),
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for plan in PLANS:
        path = save_case(record(plan))
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB, {len(plan.runs)} runs")
