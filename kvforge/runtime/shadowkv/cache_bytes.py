"""What the cache takes of the device's and the host's memory, and how much of it is in use."""

from kvforge.engine import Manifest
from kvforge.runtime.scheduler import Scheduler
from kvforge.runtime.shadowkv.capacity import cache_shape


def cache_stats(manifest: Manifest, scheduler: Scheduler) -> dict[str, int]:
    """Return bytes allocated and in use, shadow pages, and sequences whose prompt is factored.

    In use are pages with a holder, and the slots of factored sequences. Alignment is not counted.
    """
    config, pool, shadow = scheduler.config, scheduler.pool, scheduler.shadow_pages
    shape = cache_shape(manifest, config.max_num_seqs, config.max_seq_len)
    num_factored = sum(sequence.cache_shift < 0 for sequence in scheduler.running)
    used = pool.num_used * shape.page_bytes + shadow.num_used * shape.shadow_page_bytes
    return {
        "kv_device_bytes": shape.device_bytes(config.num_pages, shadow.num_pages),
        "kv_device_used_bytes": used + num_factored * shape.slot_bytes,
        "kv_host_bytes": shadow.num_pages * shape.host_page_bytes,
        "kv_host_used_bytes": shadow.num_used * shape.host_page_bytes,
        "num_shadow_pages": shadow.num_pages,
        "num_used_shadow_pages": shadow.num_used,
        "num_factored": num_factored,
        "num_factored_prompts": shadow.num_factored,
    }
