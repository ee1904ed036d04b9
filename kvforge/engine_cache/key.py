"""What an engine of the cache is found by."""

import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import plugins
from kvforge.checkpoint import Checkpoint
from kvforge.common.hardware import best_isa
from kvforge.common.kept_file import write_kept
from kvforge.compiler import BuildOptions
from kvforge.compiler.targets import isa_of
from kvforge.manifest import SCHEMA_VERSION
from kvforge.version import __version__
from plugins.units import BEST_ISA, sources_version

_SETTLED_NS = 2 * 10**9
"""A file that changed later than this before it was read may change again without another time of change."""


def engine_key(
    checkpoint_sha256: str,
    options: BuildOptions,
    predictor_sha256: str | None = None,
    calibration_sha256: str | None = None,
    draft_head_sha256: str | None = None,
    scorer_sha256: str | None = None,
) -> str:
    """Return 24 hex digits: equal for equal content, options, machine and versions of kvforge and torch. Predictors,
    calibration texts, draft heads and scorers count by content, as it may change where they lie. Raises BuildError for
    an unknown target."""
    parts: dict[str, Any] = {
        "checkpoint": checkpoint_sha256,
        "options": dataclasses.asdict(options),
        "machine": [*isa_of(options.target), best_isa(), os.environ.get(BEST_ISA, "")],
        "versions": [__version__, SCHEMA_VERSION, torch.__version__, sources_version()],
        "operators": {operator.name: operator.version for operator in plugins.OPERATORS.values()},
    }
    optional = {
        "predictor": predictor_sha256,
        "calibration": calibration_sha256,
        "draft_head": draft_head_sha256,
        "scorer": scorer_sha256,
    }
    parts |= {name: content for name, content in optional.items() if content is not None}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def content_of(checkpoint: Checkpoint, folder: Path) -> str:
    """Return the SHA-256 of a checkpoint. It is kept below ``folder``, so that the files are read again only when one
    of them has another size or time of change. Raises OSError where that cannot be written."""
    states = [(file.name, file.stat()) for file in checkpoint.files()]
    seen = [(name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in states]
    text = json.dumps([str(checkpoint.path.resolve()), seen])
    kept = folder / "checkpoints" / hashlib.sha256(text.encode()).hexdigest()[:24]
    if kept.is_file():
        return kept.read_text(encoding="ascii")
    begun = time.time_ns()
    content = checkpoint.sha256()
    if all(at.st_ctime_ns < begun - _SETTLED_NS for _, at in states):
        write_kept(kept, content.encode("ascii"))
    return content
