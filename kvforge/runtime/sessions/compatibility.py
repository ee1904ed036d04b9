"""Whether an engine was built for this torch and these operators."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

import plugins
from kvforge.common.errors import EngineError
from kvforge.kv_policies.policy import has_transitions
from kvforge.manifest import Manifest
from kvforge.runtime.sessions.missing import NO_ROPE_TABLES

ROPE_TABLES = ("rope_cos", "rope_sin")
"""The names of cos and sin of every position among an engine's weights."""


def register_transitions(manifest: Manifest) -> None:
    """Make the operators run on a GPU where the KV policy changes caches there, between steps.

    Raises:
        EngineError: there is no Triton, which compiles them.
    """
    if not has_transitions(manifest.policy):
        return
    from plugins import PluginError, cuda_ops

    try:
        cuda_ops.register()
    except PluginError as error:
        raise EngineError(str(error)) from error


def rope_tables(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return an engine's cos and sin of every position; raises EngineError where it has none."""
    if not weights.keys() >= {*ROPE_TABLES}:
        raise EngineError(NO_ROPE_TABLES)
    cos, sin = (weights[name] for name in ROPE_TABLES)
    return cos, sin


def check_torch(manifest: Manifest, engine_dir: Path) -> None:
    """Raise EngineError unless the engine was built with this version of torch."""
    if manifest.torch_version != torch.__version__:
        raise EngineError(
            f"{engine_dir} was built with torch {manifest.torch_version}, this is torch "
            f"{torch.__version__}; rebuild the engine with kvforge build."
        )


def check_operators(manifest: Manifest, engine_dir: Path) -> None:
    """Raise EngineError unless the engine's operators mean what this kvforge's do."""
    versions = {operator.name: operator.version for operator in plugins.OPERATORS.values()}
    if missing := sorted(manifest.operators.keys() - versions.keys()):
        raise EngineError(
            f"{engine_dir} uses operators that are not there ({', '.join(missing)}); put their folder on "
            "$KVFORGE_PLUGIN_PATH, or rebuild the engine with kvforge build."
        )
    if other := sorted(name for name, version in manifest.operators.items() if versions[name] != version):
        raise EngineError(
            f"{engine_dir} uses other versions of operators than this kvforge ({', '.join(other)}); rebuild the engine "
            "with kvforge build."
        )
