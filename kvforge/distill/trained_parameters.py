"""Which parameters distillation changes, in which precision they are kept, and what tells models apart."""

import dataclasses
import hashlib
import re

import torch
from torch import nn

from kvforge.common.errors import CheckpointError
from kvforge.swiftkv import SwiftKVForCausalLM
from kvforge.swiftkv.norms import make_norm
from model_defs.weights import is_teacher_only

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SAMPLE = 64
"""Elements of each tensor that tell models apart; reading all of a large model would take minutes."""


def is_trained(name: str, cut: int, train: str, is_blind: bool = False) -> bool:
    """Whether `--train train` changes the parameter of this name. Above a blind cut the projections that others have
    for their teacher alone are trained."""
    if "_swiftkv." in name or "_early_exit." in name:
        return True
    if is_teacher_only(name, cut):
        return is_blind
    if train == "partial":
        return False
    layer = _LAYER.search(name)
    return train == "full" or (layer is not None and int(layer[1]) >= cut)


def add_early_exit_head(model: SwiftKVForCausalLM) -> None:
    """Give a model without one an early-exit head that starts as its final norm and LM head (a copy)."""
    if has_early_exit(model):
        return
    sizes, output = model.sizes, model.model.embed_tokens if model.sizes.tie_embeddings else model.lm_head
    norm = make_norm(sizes, sizes.hidden_size)
    norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())
    head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False, device="meta")
    head.weight = nn.Parameter(output.weight.detach().clone())
    model.model.norm_early_exit = norm
    model.lm_head_early_exit = head
    model.sizes = dataclasses.replace(sizes, early_exit=True)


def has_early_exit(model: SwiftKVForCausalLM) -> bool:
    """Whether the model has an early-exit head."""
    return hasattr(model, "lm_head_early_exit")


def prepare(model: SwiftKVForCausalLM, train: str, dtype: str) -> dict[str, nn.Parameter]:
    """Freeze what is not trained and return the rest by name, in fp32.

    Frozen weights keep the dtype they were loaded in, but for ``dtype`` ``float32``, where all are made so.
    """
    trained = {}
    for name, parameter in model.named_parameters():
        chosen = is_trained(name, model.sizes.cut, train, model.sizes.is_blind)
        parameter.requires_grad_(chosen)
        if chosen or dtype == "float32":
            parameter.data = parameter.data.to(torch.float32)
        if chosen:
            trained[name] = parameter
    return trained


def check_model(model: SwiftKVForCausalLM) -> None:
    """Raise CheckpointError unless the model has a cut and the projections its upper layers had before."""
    if model.sizes.is_blind:
        return
    if not model.sizes.is_swiftkv:
        raise CheckpointError("A model without a cut has nothing to distil; make one with kvforge rewire first.")
    if not any(is_teacher_only(name, model.sizes.cut) for name, _ in model.named_parameters()):
        raise CheckpointError(
            "The model was made without its teacher's projections; load it with_teacher, or make it again with "
            "kvforge rewire."
        )


def fingerprint(model: SwiftKVForCausalLM, only_teacher: bool = True, without: str | None = None) -> str:
    """Return a hash of names, shapes and some elements of the weights; ``only_teacher`` leaves out what distillation
    adds and always changes, ``without`` those whose names begin so."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if only_teacher and is_trained(name, model.sizes.cut, "partial"):
            continue
        if without is not None and name.startswith(without):
            continue
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} ".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
