"""What --prefix-dir and --prefix-gib make of an engine, or why not."""

import math
from pathlib import Path

from kvforge.common.errors import EngineError
from kvforge.manifest import Manifest
from kvforge.prefix_store.folder import EngineFolder
from kvforge.prefix_store.identity import describe, engine_key
from kvforge.prefix_store.page_file import HEADER
from kvforge.runtime.prefixes.options import DEFAULT_GIB, check_prefix_options
from kvforge.runtime.prefixes.page_memory import PageMemory
from kvforge.runtime.prefixes.tier import DiskTier
from kvforge.runtime.scheduling.scheduler import Scheduler
from kvforge.runtime.sessions.pools import Pools


def open_tier(
    scheduler: Scheduler, manifest: Manifest, pools: Pools, prefix_dir: str | Path | None, prefix_gib: float | None
) -> DiskTier | None:
    """Give a scheduler a disk tier below its prefix cache, where one is asked for; it is the caller's to close.

    Raises:
        EngineError: the engine's prefixes cannot be kept so, or the folder cannot be used.
    """
    check_prefix_options(manifest, prefix_dir, prefix_gib, scheduler.config.enable_prefix_cache)
    if prefix_dir is None:
        return None
    memory = PageMemory(manifest, pools)
    limit, page = int(min((prefix_gib or DEFAULT_GIB) * 2**30, 2.0**62)), HEADER.size + memory.page_bytes
    if limit < page:
        raise EngineError(
            f"prefix_gib is {prefix_gib}, less than one page of {page} bytes; give {math.ceil(page / 2**20)} MiB."
        )
    about = {**describe(manifest), "page_bytes": page}
    folder = EngineFolder(Path(prefix_dir).absolute(), engine_key(manifest), about, limit)
    tier = DiskTier(folder, memory, scheduler.prefix_cache, scheduler.config.num_pages)
    scheduler.fetches.source = tier
    return tier
