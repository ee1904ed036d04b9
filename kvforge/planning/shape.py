"""The shape of a model from its configuration or its engine."""

import dataclasses
from typing import TYPE_CHECKING, Any

from kvforge.costs.flops import skipped_token
from kvforge.costs.shape import Experts, LatentAttention, ModelShape
from kvforge.manifest import Manifest

if TYPE_CHECKING:
    from model_defs import ModelConfig

_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("max_position", "layer_windows", "cut", "owner_of_layer", "early_exit"),
    *("layer_head_dims", "layer_intermediate_sizes"),
)


def shape_of_config(config: "ModelConfig", model: str | None = None) -> ModelShape:
    """Return the shape of a model configuration."""
    from model_defs.weights import weight_specs

    native = bool(config.layer_owners)
    base = config if native else dataclasses.replace(config, cut=config.num_layers, group_size=1, early_exit=False)
    return ModelShape(
        model=model or config.model_type,
        base_parameters=sum(spec.num_parameters for spec in weight_specs(base)),
        kv_bias=config.qkv_bias,
        k_norm=config.qk_norm,
        experts=_experts(config),
        latent=None if config.latent is None else LatentAttention(**dataclasses.asdict(config.latent)),
        is_native=native,
        **_sizes(config),
    )


def _sizes(model: "ModelConfig | Manifest") -> dict[str, Any]:
    return {name: getattr(model, name) for name in _SHARED} | {"per_layer_input": model.per_layer_input or None}


def _experts(config: "ModelConfig") -> Experts | None:
    if config.experts is None:
        return None
    return Experts(
        num_routed=config.experts.num_experts,
        num_active=config.experts.num_active,
        num_shared=config.experts.num_shared,
        intermediate_size=config.experts.intermediate_size,
        dense_layers=tuple(layer for layer in range(config.num_layers) if not config.has_experts(layer)),
    )


def shape_of_manifest(manifest: Manifest, model: str | None = None) -> ModelShape:
    """Return the shape of an engine; its parameter count says what the model without a cut would have."""
    kv_bias, k_norm = manifest.kv_bias, manifest.k_norm
    if kv_bias is None or k_norm is None:
        from model_defs import family_of

        family = family_of({"model_type": manifest.model_type})
        traits = {} if family is None else family.traits
        kv_bias, k_norm = traits.get("qkv_bias", False), traits.get("qk_norm", False)
    bare = ModelShape(
        model=model or manifest.model_type,
        base_parameters=0,
        kv_bias=kv_bias,
        k_norm=k_norm,
        experts=manifest.experts,
        latent=manifest.latent,
        is_native=max(manifest.owner_of_layer) < manifest.cut < manifest.num_layers,
        **_sizes(manifest),
    )
    return dataclasses.replace(bare, base_parameters=manifest.num_parameters - bare.num_parameters)


def prefill_flops_per_token(manifest: Manifest, context_length: int) -> float:
    """Return the mean FLOPs of one prompt token of an engine that is not sampled from (``skipped_token``), and that is
    not computed besides where prompts are predicted."""
    if not manifest.predicts:
        return skipped_token(shape_of_manifest(manifest), context_length).total
    auxiliary = auxiliary_shape(manifest)
    maps = 2 * auxiliary.hidden_size * manifest.num_owners * manifest.cached_numbers
    return skipped_token(auxiliary, context_length).total + maps


def auxiliary_shape(manifest: Manifest) -> ModelShape:
    """Return the layers that are run of an engine's auxiliary model, as a model without a cut; its MLPs are taken to be
    as wide as the engine's own, as those of a model's lower layers are."""
    sizes: dict[str, Any] = dict(manifest.auxiliary_model)
    layers = sizes["num_layers"]
    like = dataclasses.replace(manifest, cut=layers, owner_of_layer=tuple(range(layers)), layer_windows=(0,) * layers)
    return shape_of_manifest(dataclasses.replace(like, **sizes))
