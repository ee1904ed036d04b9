"""What an engine of target ``vllm`` is beside its manifest: a checkpoint, an interpreter and vLLM's arguments."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvforge.common.errors import BuildError, EngineError

SETTINGS_FILE = "vllm.json"
CHECKPOINT_DIR = "checkpoint"
"""Where a copied checkpoint lies in an engine."""

OURS = {
    "model": "the checkpoint",
    "tokenizer": "the checkpoint",
    "dtype": "--dtype",
    "block_size": "--page-size",
    "max_model_len": "--max-seq-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-tokens",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "kv_cache_memory_bytes": "--kv-cache-gib of kvforge serve",
    "enable_prefix_caching": "--no-prefix-cache of kvforge serve",
}
"""Arguments of vLLM's engine that are not given as such, and what says them."""


@dataclass(frozen=True)
class VllmSettings:
    """``checkpoint`` is an absolute path, or CHECKPOINT_DIR for the copy in the engine; ``arguments`` are further ones
    of vLLM's ``EngineArgs``. ``config`` goes before what ``config.json`` has. ``checkpoint_bytes`` are the sizes of
    the checkpoint's files by name: one that changed is another model."""

    python: str
    vllm_version: str
    checkpoint: str
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    has_cut: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    checkpoint_bytes: dict[str, int] = field(default_factory=dict)

    def checkpoint_in(self, engine_dir: Path) -> Path:
        """Return the checkpoint's folder.

        Raises:
            EngineError: it is not there any more, or was changed.
        """
        folder = Path(engine_dir) / CHECKPOINT_DIR if self.checkpoint == CHECKPOINT_DIR else Path(self.checkpoint)
        for name, size in self.checkpoint_bytes.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != size:
                what = "is another file than at the build" if file.is_file() else "is missing"
                raise EngineError(
                    f"{file}, which the engine {Path(engine_dir).name!r} is of, {what}; put it back, or build the "
                    "engine again with --copy-checkpoint."
                )
        return folder


def save_settings(settings: VllmSettings, engine_dir: Path) -> None:
    """Write ``vllm.json``."""
    text = json.dumps(asdict(settings), indent=1) + "\n"
    (engine_dir / SETTINGS_FILE).write_text(text, encoding="utf-8")


def load_settings(engine_dir: str | Path) -> VllmSettings:
    """Read ``vllm.json``, whose SHA-256 the manifest has.

    Raises:
        EngineError: it is missing or damaged.
    """
    path = Path(engine_dir) / SETTINGS_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.keys() != {item.name for item in fields(VllmSettings)}:
            raise ValueError("it is of another kvforge")
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read ({error}); build the engine again with --target vllm.") from None
    return VllmSettings(**data)


def parse_arguments(text: str | None) -> dict[str, Any]:
    """Return vLLM's further arguments from their JSON.

    Raises:
        BuildError: it is no JSON object, or names what has an option of its own.
    """
    if text is None:
        return {}
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BuildError(f"--engine-args is not JSON ({error}); give an object of vLLM's engine arguments.") from None
    if not isinstance(arguments, dict):
        raise BuildError("--engine-args is no JSON object; give one of vLLM's engine arguments.")
    for name in arguments:
        if name in OURS:
            raise BuildError(f"--engine-args has {name}, which {OURS[name]} says; leave it out there.")
    return arguments
