"""What is kept of prefixes and where, on a command line, and which engines these options are for."""

import argparse
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvforge.common.errors import EngineError
from kvforge.manifest import Manifest

DEFAULT_GIB = 16.0


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
    parser.add_argument(
        "--prefix-host-gib", type=float, metavar="GIB",
        help="main memory that keeps prompts of which a GPU's memory lacks room (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--snapshot-every", type=int, metavar="PAGES",
        help="of a model whose layers keep a state: pages of a sequence to a state that is kept, where prompts that "
        "begin alike go on; 0: none, and no prompt does (default: as many as take a state's bytes)",
    )  # fmt: skip
    parser.add_argument(
        "--num-snapshots", type=int, metavar="N",
        help="such states at most (default: a quarter of what running sequences leave of the cache)",
    )  # fmt: skip


def prefix_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return those that are given, as ``LLMEngine`` takes them."""
    return {item.name: value for item in fields(PrefixOptions) if (value := getattr(args, item.name)) is not None}


def is_in_main_memory(manifest: Manifest) -> bool:
    """Whether the cache of such an engine lies there."""
    return manifest.target == "cpu"


@dataclass(frozen=True)
class PrefixOptions:
    """Where prefixes are kept that the pool lacks: a folder of at most ``prefix_gib`` GiB (default 16), and
    ``prefix_host_gib`` GiB of main memory below a pool that lies on a GPU. In the pool, of models with linear
    attention: a state after each ``snapshot_every`` pages, ``num_snapshots`` at most."""

    prefix_dir: str | Path | None = None
    prefix_gib: float | None = None
    prefix_host_gib: float | None = None
    snapshot_every: int | None = None
    num_snapshots: int | None = None

    @property
    def is_given(self) -> bool:
        """There is a tier below the pool."""
        return self.prefix_dir is not None or self.prefix_host_gib is not None

    def check(self, manifest: Manifest, enable_prefix_cache: bool = True) -> None:
        """Raise EngineError where an engine cannot keep its prefixes as is asked."""
        if self.prefix_gib is not None and self.prefix_dir is None:
            raise EngineError(
                "prefix_gib is the limit of prefix_dir; give --prefix-dir too, or leave --prefix-gib out."
            )
        for name in ("prefix_gib", "prefix_host_gib"):
            if (gib := getattr(self, name)) is not None and not 0 < gib < math.inf:
                raise EngineError(f"{name} is {gib}; give a finite size above 0.")
        for name, minimum in (("snapshot_every", 0), ("num_snapshots", 1)):
            if (count := getattr(self, name)) is None:
                continue
            if manifest.target == "vllm":
                raise EngineError(f"{name} is for kvforge's own engines, and this one is of target vllm; leave it out.")
            if not manifest.state_bytes:
                raise EngineError(f"{name} is for models with layers that keep a state; leave it out.")
            if count < minimum:
                instead = ", or --snapshot-every 0 to keep none" if minimum else ""
                raise EngineError(f"{name} is {count}; give {minimum} or more{instead}.")
            if count and not enable_prefix_cache:
                raise EngineError(
                    f"{name} is of states that prompts which begin alike go on from, and --no-prefix-cache is given; "
                    "leave one of them out."
                )
        if self.num_snapshots is not None and self.snapshot_every == 0:
            raise EngineError(f"num_snapshots is {self.num_snapshots}, but snapshot_every 0 keeps none; leave one out.")
        if not self.is_given:
            return
        name = "prefix_dir" if self.prefix_dir is not None else "prefix_host_gib"
        if manifest.target == "vllm":
            raise EngineError(
                f"{name} is for kvforge's own engines, and this one is of target vllm; leave it out, or give vLLM its "
                "own by --engine-args of kvforge build."
            )
        if is_in_main_memory(manifest) and self.prefix_host_gib is not None:
            raise EngineError(
                "prefix_host_gib is main memory below the memory of a GPU, and this engine's cache is in main memory; "
                "give --kv-cache-gib more."
            )
        if manifest.model.is_blind:
            raise EngineError(
                f"{name} keeps pages of all owners, and above a blind cut these have pages of their own; leave it out."
            )
        if (states := manifest.model.linear) is not None:
            raise EngineError(
                f"{name} keeps K and V, and prompts of a model with {states.title} need states as well; leave it out."
            )
        if not enable_prefix_cache or manifest.predicts or manifest.policy.max_reusable(manifest.max_seq_len) == 0:
            reason = (
                "its prompts are predicted" if manifest.predicts
                else "--no-prefix-cache is given" if not enable_prefix_cache
                else f"its KV policy {manifest.policy} does not allow it"
            )  # fmt: skip
            raise EngineError(f"{name} keeps prefixes that are reused, and this engine reuses none: {reason}.")
