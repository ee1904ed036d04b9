"""What of an engine's manifest the model and the options decide, and the tokenizer's files."""

from pathlib import Path
from typing import Any

from kvforge.checkpoint import Checkpoint
from kvforge.common.checkpoint_files import copy_tokenizer_files
from kvforge.compiler.options import ResolvedOptions
from model_defs import ModelConfig


def copy_tokenizer(checkpoint: Checkpoint, target: Path) -> None:
    """Copy the tokenizer's files of a checkpoint into the new folder ``target``."""
    target.mkdir()
    copy_tokenizer_files(checkpoint.folder, target)


def manifest_fields(config: ModelConfig, options: ResolvedOptions) -> dict[str, Any]:
    """Return the fields of an engine's manifest that model and options decide, not its target and files."""
    prediction = options.prediction
    return {
        "dtype": options.dtype,
        "weight_dtype": options.weight_dtype,
        "kv_dtype": options.kv_dtype,
        "kv_scales": options.kv_scales,
        "kv_policy": options.policy.name,
        "kv_policy_parameters": options.policy.parameters,
        "model": config,
        "auxiliary_model": prediction and prediction.auxiliary.first_layers(prediction.num_layers - 1),
        "draft_head": options.draft_head,
        "page_size": options.page_size,
        "max_num_seqs": options.max_num_seqs,
        "max_num_tokens": options.max_num_tokens,
        "max_seq_len": options.max_seq_len,
        "max_draft_len": options.max_draft_len,
        "decoupled_mode": options.decoupled_mode,
    }
