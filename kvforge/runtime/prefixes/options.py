"""--prefix-dir and --prefix-gib on a command line, and which engines they are for."""

import argparse
import math
from pathlib import Path
from typing import Any

from kvforge.common.errors import EngineError
from kvforge.manifest import Manifest

DEFAULT_GIB = 16.0
NAMES = ("prefix_dir", "prefix_gib")


def add_prefix_options(parser: argparse._ActionsContainer) -> None:
    """Declare them."""
    parser.add_argument(
        "--prefix-dir", type=Path, metavar="DIR",
        help="keep the KV cache of prompts in files there, for this server after a restart and for others of the same "
        "engine (default: in memory alone)",
    )  # fmt: skip
    parser.add_argument(
        "--prefix-gib", type=float, metavar="GIB",
        help=f"bytes of all files in --prefix-dir at most (default: {DEFAULT_GIB:g})",
    )  # fmt: skip


def prefix_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return those that are given, as ``LLMEngine`` takes them."""
    return {name: value for name in NAMES if (value := getattr(args, name)) is not None}


def check_prefix_options(
    manifest: Manifest, prefix_dir: str | Path | None, prefix_gib: float | None, enable_prefix_cache: bool = True
) -> None:
    """Raise EngineError where an engine cannot keep its prefixes as is asked."""
    if prefix_gib is not None and prefix_dir is None:
        raise EngineError("prefix_gib is the limit of prefix_dir; give --prefix-dir too, or leave --prefix-gib out.")
    if prefix_gib is not None and not 0 < prefix_gib < math.inf:
        raise EngineError(f"prefix_gib is {prefix_gib}; give a finite size above 0.")
    if prefix_dir is None:
        return
    if manifest.target != "cpu":
        raise EngineError(
            f"prefix_dir is for engines of target cpu, and this one is of target {manifest.target}; leave out "
            "--prefix-dir, or build the engine for --target cpu."
        )
    if manifest.model.is_blind:
        raise EngineError(
            "prefix_dir keeps pages of all owners, and above a blind cut these have pages of their own; leave out "
            "--prefix-dir."
        )
    if not enable_prefix_cache or manifest.predicts or manifest.policy.max_reusable(manifest.max_seq_len) == 0:
        reason = (
            "its prompts are predicted" if manifest.predicts
            else "--no-prefix-cache is given" if not enable_prefix_cache
            else f"its KV policy {manifest.policy} does not allow it"
        )  # fmt: skip
        raise EngineError(f"prefix_dir keeps prefixes that are reused, and this engine reuses none: {reason}.")
