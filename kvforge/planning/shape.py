"""The shape of a model from its configuration or its engine."""

import dataclasses
from typing import TYPE_CHECKING

from kvforge.costs.flops import skipped_token
from kvforge.costs.shape import Experts, ModelShape, dense_parameters
from kvforge.manifest import Manifest

if TYPE_CHECKING:
    from model_defs import ModelConfig

_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("max_position", "layer_windows", "cut", "owner_of_layer", "early_exit"),
)


def shape_of_config(config: "ModelConfig", model: str | None = None) -> ModelShape:
    """Return the shape of a model configuration."""
    sizes = {name: getattr(config, name) for name in _SHARED}
    bare = ModelShape(
        model=model or config.model_type,
        base_parameters=0,
        kv_bias=config.qkv_bias,
        k_norm=config.qk_norm,
        experts=_experts(config),
        **sizes,
    )
    extra = config.head_dim if config.qk_norm else 0  # the query's norm
    extra += config.hidden_size if config.output_bias else 0
    extra += 2 * config.intermediate_size + config.hidden_size if config.mlp_bias else 0
    extra += 2 * config.hidden_size if config.branch_norms else 0
    parameters = dense_parameters(bare, tied=config.tie_embeddings, q_bias=config.qkv_bias, extra_per_layer=extra)
    return dataclasses.replace(bare, base_parameters=parameters)


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
    sizes = {name: getattr(manifest, name) for name in _SHARED}
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
        **sizes,
    )
    return dataclasses.replace(bare, base_parameters=manifest.num_parameters - bare.num_parameters)


def prefill_flops_per_token(manifest: Manifest, context_length: int) -> float:
    """Return the mean FLOPs of one prompt token of an engine that is not sampled from (``skipped_token``)."""
    return skipped_token(shape_of_manifest(manifest), context_length).total
