"""What --prefix-dir, --prefix-gib and --prefix-host-gib make of an engine, or why not."""

import math
from pathlib import Path
from typing import Any

from kvforge.common.errors import EngineError
from kvforge.manifest import Manifest
from kvforge.prefix_store.folder import EngineFolder
from kvforge.prefix_store.identity import describe, engine_key
from kvforge.prefix_store.page_file import HEADER
from kvforge.prefix_store.page_store import PageStore, StackedStores
from kvforge.runtime.prefixes.device_page_memory import DevicePageMemory
from kvforge.runtime.prefixes.host_pages import HostPages
from kvforge.runtime.prefixes.options import DEFAULT_GIB, PrefixOptions, is_in_main_memory
from kvforge.runtime.prefixes.page_memory import PageMemory
from kvforge.runtime.prefixes.tier import PrefixTier
from kvforge.runtime.scheduling.scheduler import Scheduler
from kvforge.runtime.sessions.pools import Pools


def open_tier(scheduler: Scheduler, manifest: Manifest, pools: Pools, options: PrefixOptions) -> PrefixTier | None:
    """Give a scheduler a tier below its prefix cache, where one is asked for by options that were checked; it is the
    caller's to close.

    Raises:
        EngineError: the folder cannot be used, or memory is too small.
    """
    if not options.is_given:
        return None
    memory = (PageMemory if is_in_main_memory(manifest) else DevicePageMemory)(manifest, pools)
    stores: list[PageStore] = []
    if options.prefix_host_gib is not None:
        limit = _limit("prefix_host_gib", options.prefix_host_gib, memory.page_bytes)
        try:
            stores.append(HostPages(memory.page_bytes, limit))
        except MemoryError:
            raise EngineError(
                f"prefix_host_gib is {options.prefix_host_gib}, and main memory has not so much; give less."
            ) from None
    if options.prefix_dir is not None:
        page = HEADER.size + memory.page_bytes
        limit = _limit("prefix_gib", options.prefix_gib or DEFAULT_GIB, page)
        about: dict[str, Any] = {**describe(manifest), "page_bytes": page}
        stores.append(EngineFolder(Path(options.prefix_dir).absolute(), engine_key(manifest), about, limit))
    store = stores[0] if len(stores) == 1 else StackedStores(stores)
    tier = PrefixTier(store, memory, scheduler.prefix_cache, scheduler.config.num_pages)
    scheduler.fetches.source = tier
    return tier


def _limit(name: str, gib: float, page_bytes: int) -> int:
    limit = int(min(gib * 2**30, 2.0**62))
    if limit < page_bytes:
        needed = math.ceil(page_bytes / 2**20)
        raise EngineError(f"{name} is {gib}, less than one page of {page_bytes} bytes; give {needed} MiB.")
    return limit
