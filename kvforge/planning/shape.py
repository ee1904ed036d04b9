"""The shape of a model from its configuration or its engine."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from kvforge.costs.flops import skipped_token
from kvforge.costs.shape import Experts, ModelShape, dense_parameters
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
    bare = ModelShape(
        model=model or config.model_type,
        base_parameters=0,
        kv_bias=config.qkv_bias,
        k_norm=config.qk_norm,
        experts=_experts(config),
        is_native=bool(config.layer_owners),
        **_sizes(config),
    )
    if config.layer_owners or config.per_layer_input:
        from model_defs.weights import weight_specs

        return dataclasses.replace(bare, base_parameters=sum(math.prod(spec.shape) for spec in weight_specs(config)))
    extra = config.head_dim if config.qk_norm else 0  # the query's norm
    extra += config.hidden_size if config.output_bias else 0
    extra += 2 * config.intermediate_size + config.hidden_size if config.mlp_bias else 0
    extra += 2 * config.hidden_size if config.branch_norms else 0
    parameters = dense_parameters(bare, tied=config.tie_embeddings, q_bias=config.qkv_bias, extra_per_layer=extra)
    return dataclasses.replace(bare, base_parameters=parameters)


def _sizes(model: "ModelConfig | Manifest") -> dict[str, Any]:
    return {name: getattr(model, name) for name in _SHARED} | {"per_layer_input": model.per_layer_input or None}


def _experts(config: "ModelConfig") -> Experts | None:
    if config.experts is None:
        return None
    return Experts(
        num_routed=config.experts.num_experts,
        num_active=config.experts.num_active,
        num_shared=0,
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
        is_native=max(manifest.owner_of_layer) < manifest.cut < manifest.num_layers,
        **_sizes(manifest),
    )
    return dataclasses.replace(bare, base_parameters=manifest.num_parameters - bare.num_parameters)


def prefill_flops_per_token(manifest: Manifest, context_length: int) -> float:
    """Return the mean FLOPs of one prompt token of an engine that is not sampled from (``skipped_token``)."""
    return skipped_token(shape_of_manifest(manifest), context_length).total
