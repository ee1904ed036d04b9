"""How many states of layers the memory of the cache holds."""

import logging
from dataclasses import dataclass

from kvforge.common.errors import EngineError
from kvforge.manifest import Manifest
from kvforge.runtime.cache_capacity import CacheShape

logger = logging.getLogger(__name__)

LIVE_SHARE = 2
"""States of running sequences take one byte of so many, or less where the pages of one sequence take more."""
SNAPSHOT_SHARE = 4
"""Snapshots take one of so many bytes of what both leave."""


@dataclass(frozen=True)
class StateCounts:
    """Sequences of a step, rows of states of running sequences and their drafts, snapshots, and of how many pages of a
    sequence one has a snapshot; the last two are 0 where prefixes are not reused."""

    max_num_seqs: int
    num_rows: int = 0
    num_snapshots: int = 0
    snapshot_every: int = 0


def rows_per_sequence(manifest: Manifest) -> int:
    """Return the rows that a running sequence and its drafts take; 0 without layers that keep a state."""
    return 1 + manifest.max_draft_len if manifest.state_bytes else 0


def bytes_for_all(manifest: Manifest, shape: CacheShape) -> int:
    """Return the bytes in which sequences of ``shape``, which counts one's states, all have theirs, and one the pages
    of the greatest length."""
    live = shape.max_num_seqs * rows_per_sequence(manifest) * shape.row_bytes
    return max(shape.least_bytes - shape.num_rows * shape.row_bytes + live, LIVE_SHARE * live)


def count_states(
    manifest: Manifest,
    shape: CacheShape,
    num_bytes: int | None,
    num_pages: int | None,
    num_snapshots: int | None,
    snapshot_every: int | None,
    reuses_prefixes: bool,
) -> StateCounts:
    """Return the states for sequences of ``shape``, which counts one's states, in ``num_bytes`` or with ``num_pages``.

    Sequences that do not fit in their share of the bytes are left out. By default a sequence has a snapshot after as
    many pages as take the bytes of a state, and no more snapshots are kept than pages of all sequences could have.

    Raises:
        EngineError: so many snapshots do not fit.
    """
    seqs, each = shape.max_num_seqs, rows_per_sequence(manifest)
    if not each:
        return StateCounts(seqs)
    row, one_sequence = manifest.state_bytes, shape.pages * shape.page_bytes
    free = manifest.page_bytes * (num_pages or 0)
    if num_bytes is not None:
        others = num_bytes - shape.fixed_bytes + each * row
        fitting = min(others // LIVE_SHARE, others - one_sequence) // (each * row)
        seqs = max(1, min(seqs, fitting))
        free = others - seqs * each * row - one_sequence
    every = -(-row // shape.page_bytes) if snapshot_every is None else snapshot_every
    if not (every and reuses_prefixes):
        return StateCounts(seqs, seqs * each)
    useful = seqs * (1 + shape.pages // every)
    count = min(free // SNAPSHOT_SHARE // row, useful) if num_snapshots is None else num_snapshots
    if num_bytes is not None and count * row > free:
        raise EngineError(
            f"num_snapshots is {count}, but beside one sequence the KV cache holds {free // row}; lower it, or raise "
            "--kv-cache-gib."
        )
    if count <= 0:
        logger.warning(
            "no prefix is reused, as the cache has no room for a state to go on from; raise --kv-cache-gib, lower "
            "--max-num-seqs or give --num-snapshots"
        )
        return StateCounts(seqs, seqs * each)
    return StateCounts(seqs, seqs * each, count, every)
