"""What of an engine's manifest the model and the options decide, and the tokenizer's files."""

from pathlib import Path
from typing import Any

from kvforge.checkpoint import Checkpoint
from kvforge.common.checkpoint_files import copy_tokenizer_files
from kvforge.compiler.options import ResolvedOptions
from kvforge.manifest.manifest import AUXILIARY_SIZES
from model_defs import ModelConfig


def copy_tokenizer(checkpoint: Checkpoint, target: Path) -> None:
    """Copy the tokenizer's files of a checkpoint into the new folder ``target``."""
    target.mkdir()
    copy_tokenizer_files(checkpoint.folder, target)


def manifest_fields(config: ModelConfig, options: ResolvedOptions) -> dict[str, Any]:
    """Return the fields of an engine's manifest that model and options decide, not its target and files."""
    return {
        "dtype": options.dtype,
        "weight_dtype": options.weight_dtype,
        "kv_dtype": options.kv_dtype,
        "kv_scales": options.kv_scales,
        "kv_policy": options.policy.name,
        "kv_policy_parameters": options.policy.parameters,
        "model_type": config.model_type,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "kv_bias": config.qkv_bias,
        "k_norm": config.qk_norm,
        "vocab_size": config.vocab_size,
        "max_position": config.max_position,
        "layer_windows": config.layer_windows,
        "cut": config.cut,
        "owner_of_layer": config.owner_of_layer,
        "early_exit": config.early_exit,
        **_expert_fields(config),
        **_layer_fields(config),
        **_latent_fields(config),
        "auxiliary_model": _auxiliary_fields(options),
        "page_size": options.page_size,
        "max_num_seqs": options.max_num_seqs,
        "max_num_tokens": options.max_num_tokens,
        "max_seq_len": options.max_seq_len,
        "max_draft_len": options.max_draft_len,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": config.eos_token_ids,
        "decoupled_mode": options.decoupled_mode,
    }


def _auxiliary_fields(options: ResolvedOptions) -> dict[str, int]:
    if options.prediction is None:
        return {}
    sizes = {name: getattr(options.prediction.auxiliary, name) for name in AUXILIARY_SIZES}
    return sizes | {"num_layers": options.prediction.num_layers - 1}


def _expert_fields(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None:
        return {}
    return {
        "num_experts": config.experts.num_experts,
        "num_active_experts": config.experts.num_active,
        "expert_intermediate_size": config.experts.intermediate_size,
        "num_shared_experts": config.experts.num_shared or None,
        "dense_layers": tuple(layer for layer in range(config.num_layers) if not config.has_experts(layer)),
    }


def _layer_fields(config: ModelConfig) -> dict[str, Any]:
    """What differs from layer to layer."""
    return {
        "layer_head_dims": config.layer_head_dims,
        "layer_intermediate_sizes": config.layer_intermediate_sizes,
        "per_layer_input": config.per_layer_input or None,
    }


def _latent_fields(config: ModelConfig) -> dict[str, Any]:
    if config.latent is None:
        return {}
    return {
        "latent_rank": config.latent.rank,
        "latent_rope_dim": config.latent.rope_dim,
        "latent_nope_dim": config.latent.nope_dim,
        "latent_value_dim": config.latent.value_dim,
        "query_rank": config.latent.query_rank,
    }
