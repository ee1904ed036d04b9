"""The manifest of an engine that was written, and the tokenizer's files."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvforge.checkpoint import Checkpoint
from kvforge.common.checkpoint_files import copy_tokenizer_files
from kvforge.compiler.options import ResolvedOptions
from kvforge.manifest import SCHEMA_VERSION, Manifest, sha256_of
from kvforge.version import __version__
from model_defs import ModelConfig


def copy_tokenizer(checkpoint: Checkpoint, target: Path) -> None:
    """Copy the tokenizer's files of a checkpoint into the new folder ``target``."""
    target.mkdir()
    copy_tokenizer_files(checkpoint.folder, target)


def manifest_fields(config: ModelConfig, options: ResolvedOptions) -> dict[str, Any]:
    """Return the fields of an engine's manifest that model and options decide, which have the options' names."""
    prediction = options.prediction
    fields = (field.name for field in dataclasses.fields(Manifest))
    return {name: getattr(options, name) for name in fields if hasattr(options, name)} | {
        "kv_policy": options.policy.name,
        "kv_policy_parameters": options.policy.parameters,
        "model": config,
        "auxiliary_model": prediction and prediction.auxiliary.first_layers(prediction.num_layers - 1),
    }


def manifest_of(
    checkpoint_sha256: str,
    config: ModelConfig,
    options: ResolvedOptions,
    folder: Path,
    *left_out: str,
    known: Mapping[Path, str] = MappingProxyType({}),
    **more: Any,
) -> Manifest:
    """Return the manifest of an engine whose files lie in ``folder``, but for folders of the names ``left_out``.
    ``known`` has the SHA-256 of files that are not read again; ``more`` are the fields that neither model nor options
    decide."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not {*left_out} & {*path.parts})
    return Manifest(
        schema_version=SCHEMA_VERSION,
        kvforge_version=__version__,
        **manifest_fields(config, options),
        **more,
        checkpoint_sha256=checkpoint_sha256,
        files={str(path.relative_to(folder)): known.get(path) or sha256_of(path) for path in files},
    )
