"""A model with another cut: what a plan compares."""

import dataclasses

from kvforge.common.errors import KvforgeError
from model_defs import ModelConfig, ModelError


def with_cut(
    model: ModelConfig, cut: int, group_size: int = 1, *, name: str = "the model", num_anchors: int | None = None
) -> ModelConfig:
    """Return the model with another cut and other AcrossKV groups; ``cut = num_layers`` is the plain model. A model
    that was trained with caches shared by layers keeps those. With ``num_anchors`` the cut is blind, or with 0 it is
    not (default: as the model's).

    Raises:
        KvforgeError: the cut or the group size is not one of this model, which the sentence calls ``name``, its family
            has no SwiftKV form, its layers cannot share caches so, or it cannot have a blind cut.
    """
    layers, own_cut = model.num_layers, 1 + max(model.layer_owners, default=0)
    if not 1 <= cut <= layers:
        raise KvforgeError(f"--cut {cut} is outside {name}; give 1 to {layers}, where {layers} is no cut.")
    if model.layer_owners and cut not in (own_cut, layers):
        raise KvforgeError(
            f"--cut {cut} is not of {name}, whose layers share caches already; give {own_cut}, or {layers} for no cut."
        )
    if model.layer_owners and group_size > 1:
        raise KvforgeError(f"--group-size {group_size} is not for {name}, whose layers share caches already; give 1.")
    if group_size < 1:
        raise KvforgeError(f"--group-size is {group_size}; give the number of layers that share a cache, at least 1.")
    anchors = 0 if cut == layers else model.num_anchors if num_anchors is None else num_anchors
    early_exit = model.early_exit and cut < layers and not anchors
    try:
        made = dataclasses.replace(model, cut=cut, group_size=group_size, early_exit=early_exit, num_anchors=anchors)
        if not model.layer_owners:
            made.check_shared_caches()
    except ModelError as error:
        raise KvforgeError(f"{name}: {error}") from None
    return made


def without_cut(model: ModelConfig) -> ModelConfig:
    """Return the plain model."""
    return with_cut(model, model.num_layers)


def merged(model: ModelConfig) -> ModelConfig:
    """Return the plain model with one cache for all layers: the bound of merging caches without skipping work."""
    return dataclasses.replace(without_cut(model), layer_owners=(0,) * model.num_layers)
