"""The tensors that SwiftKV adds, from those of the source (arXiv 2410.03960, sections 3.2, 3.3 and 4)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvforge.checkpoint.safetensors_writer import TensorSpec
from kvforge.common.errors import CheckpointError
from kvforge.rewire.exit_head import EXIT_HEAD, EXIT_NORM
from kvforge.rewire.options import FITTED_INITS
from kvforge.rewire.projections import student_name
from kvforge.rewire.source import PlainCheckpoint
from kvforge.rewire.states import state_tensors
from model_defs import ModelConfig
from model_defs.weights import weight_specs

New = dict[str, tuple[TensorSpec, Callable[[], Tensor]]]
"""By name: what a new tensor is, and a function that makes it."""

NORM = "model.norm_swiftkv.weight"


def group_of(owner: int, config: ModelConfig) -> list[int]:
    """Return the layers that share ``owner``'s K,V; the last group may be smaller."""
    return [layer for layer, read in enumerate(config.owner_of_layer) if read == owner]


def new_tensors(
    source: PlainCheckpoint, config: ModelConfig, init: str, fitted: Mapping[str, Callable[[], Tensor]]
) -> New:
    """Return what the rewired model ``config`` has and ``source`` has not.

    Queries are the teacher's own. Keys and values of an owner are

    - ``copy``: of the owner's own layer, W_j;
    - ``mean``: the mean over the group's layers, mean_j W_j, what the public code does;
    - ``fold``: mean_j W_j · diag(g_j), g_j the gain of layer j's input norm;
    - ``ridge`` and ``minicache``: ``fitted``, by name; so is what updates a state.

    Latent attention has two matrices one after the other in their place, with a norm between, of which ``fold`` takes
    the owner's own, as other layers' latents are numbered in another way.

    For the other three what updates a state above the cut is of its own layer, for ``fold`` with the gain of its input
    norm (``state_tensors``).

    norm_swiftkv, which there is where layers norm their input, is layer ``cut``'s input norm for ``copy`` and ``mean``,
    gains of 1 for the other two, whose weights have the gains in them (so a gain of zero divides nothing). The early
    exit's norm and head are ``fitted``, or else the final norm and the LM head. Biases and k_norm are the owner's own
    for ``copy``, else means. Making one that is not finite raises CheckpointError."""
    new: New = {}

    def add(name: str, like: str, make: Callable[[], Tensor]) -> None:
        shapes = {each.name: each.shape for spec in weight_specs(config) for each in spec.sources}
        spec = replace(source.specs[like], name=name, shape=shapes.get(name, source.specs[like].shape))
        new[name] = spec, lambda: _finite(make().to(spec.dtype), name)

    read = source.checkpoint.read_raw
    q_names, kv_names = projection_names(config)
    for layer in range(config.cut, config.num_layers):
        attention = f"model.layers.{layer}.self_attn"
        if config.is_linear(layer):
            for name, (like, make_state) in state_tensors(source, config, layer, init == "fold").items():
                add(name, like, fitted.get(name, make_state))
            continue
        for name in q_names:
            teacher = f"{attention}.{name}"
            add(student_name(teacher), teacher, partial(read, teacher))
    for owner in config.upper_owners:
        is_alone = init == "copy" or (init == "fold" and config.latent is not None)
        group = [owner] if is_alone else group_of(owner, config)
        for name in kv_names:
            teacher = f"model.layers.{owner}.self_attn.{name}"
            fold = (
                init == "fold"
                and config.pre_norms
                and name.endswith(("k_proj.weight", "v_proj.weight", "kv_a_proj_with_mqa.weight"))
            )
            make = fitted.get(student_name(teacher), partial(_mean, source, group, name, fold))
            add(student_name(teacher), teacher, make)
    gain = f"model.layers.{config.cut}.input_layernorm.weight"
    one = 1 - config.norm_offset
    if config.pre_norms:
        add(NORM, gain, lambda: torch.full_like(read(gain), one) if init in ("fold", *FITTED_INITS) else read(gain))
    if config.early_exit:
        head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        add(EXIT_NORM, "model.norm.weight", fitted.get(EXIT_NORM, lambda: read("model.norm.weight")))
        add(EXIT_HEAD, head, fitted.get(EXIT_HEAD, lambda: read(head)))
    return new


def projection_names(config: ModelConfig) -> tuple[list[str], list[str]]:
    """Return the names in a layer's attention of what makes queries, and of what makes keys and values."""
    if config.latent is not None:
        has_rank = config.latent.query_rank is not None
        of_queries = ("q_a_proj", "q_a_layernorm", "q_b_proj") if has_rank else ("q_proj",)
        of_rows = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
        return [f"{module}.weight" for module in of_queries], [f"{module}.weight" for module in of_rows]
    kinds = ("weight", "bias") if config.qkv_bias else ("weight",)
    q_norm, k_norm = (["q_norm.weight"], ["k_norm.weight"]) if config.qk_norm else ([], [])
    q, kv = ([f"{part}_proj.{kind}" for part in parts for kind in kinds] for parts in ("q", "kv"))
    return q + q_norm, kv + k_norm


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(
            f"{name} is not finite in {str(tensor.dtype).removeprefix('torch.')}: the source's weights are damaged, or "
            "too large for this --init; give another one."
        )
    return tensor


def _mean(source: PlainCheckpoint, layers: list[int], name: str, fold: bool) -> Tensor:
    """Average a tensor over layers, in float64; ``fold`` multiplies each by the gain of its layer's input norm."""
    total: Tensor | None = None
    for layer in layers:
        tensor = source.checkpoint.read_raw(f"model.layers.{layer}.self_attn.{name}").double()
        if fold:
            gain = source.checkpoint.read_raw(f"model.layers.{layer}.input_layernorm.weight").double()
            tensor = tensor * (gain + source.config.norm_offset)
        total = tensor if total is None else total + tensor
    assert total is not None
    return total / len(layers)
