"""What the cache takes of the device's and the host's memory, and how much of it is in use."""

from kvforge.manifest import Manifest
from kvforge.runtime.cache_capacity import cache_shape
from kvforge.runtime.scheduling.scheduler import Scheduler
from kvforge.runtime.scheduling.state_rows import StateRows


def cache_stats(manifest: Manifest, scheduler: Scheduler) -> dict[str, int]:
    """Return bytes allocated and in use, state pages, pages above a blind cut, rows of states and snapshots of linear
    attention, and sequences whose cache a transition has changed.

    In use are pages with a holder, and the slots of such sequences. Alignment is not counted.
    """
    config, pool, state = scheduler.config, scheduler.pool, scheduler.state_pages
    rows = scheduler.state_rows
    shape = cache_shape(manifest, config.max_num_seqs, config.max_seq_len, rows.num_rows + rows.num_snapshots)
    num_changed = sum(sequence.cache_offset < 0 for sequence in scheduler.running)
    upper = scheduler.upper_pages.pool
    used = pool.num_used * shape.page_bytes + state.num_used * shape.state_page_bytes
    used += upper.num_used * shape.upper_page_bytes + rows.num_used * shape.row_bytes
    return {
        "kv_device_bytes": shape.device_bytes(config.num_pages, state.num_pages, upper.num_pages),
        "kv_device_used_bytes": used + num_changed * shape.slot_bytes,
        "kv_host_bytes": state.num_pages * shape.host_page_bytes,
        "kv_host_used_bytes": state.num_used * shape.host_page_bytes,
        "num_state_pages": state.num_pages,
        "num_used_state_pages": state.num_used,
        "num_upper_pages": upper.num_pages,
        "num_used_upper_pages": upper.num_used,
        "num_compacted": num_changed,
        "num_transitions": scheduler.transitions.num_planned,
    } | ({} if not rows.is_used else state_stats(rows))


def state_stats(rows: StateRows) -> dict[str, int]:
    """Return the rows of states of layers and those of running sequences, then snapshots and those kept."""
    return {
        "num_state_rows": rows.num_rows,
        "num_used_state_rows": rows.num_used,
        "num_snapshots": rows.num_snapshots,
        "num_held_snapshots": len(rows.snapshots),
    }
