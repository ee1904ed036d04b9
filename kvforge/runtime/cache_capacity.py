"""How the memory of the cache is divided into K,V pages and the state pages of the KV policy."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvforge.kv_policies.state import StatePool
from kvforge.manifest import Manifest

UPPER_SHARE = 4
"""Above a blind cut there is one page for so many below it: prompts that are three times as long as their answers take
no more."""


@dataclass(frozen=True)
class CacheShape:
    """What sequences of the greatest length take of the cache, in pages and bytes over all owners.

    ``pages`` hold such a sequence's K,V at their most, ``steady_pages`` once all transitions of a sequence that is
    prompt all through are done; ``state_pages`` are the policy's.
    """

    max_num_seqs: int
    pages: int
    steady_pages: int
    page_bytes: int
    state_pages: int = 0
    state_page_bytes: int = 0
    """Of the device."""
    host_page_bytes: int = 0
    """Of a state page on the host."""
    slot_bytes: int = 0
    """Of the device, what the policy keeps of a sequence whatever its length."""
    has_state_pages: bool = False
    """The policy's pools have pages, if only sequences longer than these would use any: there is at least one."""
    scratch_pages: int = 0
    """Of both kinds, for K and V that nobody keeps."""
    upper_page_bytes: int = 0
    """Of a page over all owners above a blind cut; 0 with any other."""
    exact_bytes: int = 0
    """Of the device, of all exact pages where pages are sealed."""
    row_bytes: int = 0
    """Of the device, of one state over all layers that keep a state."""
    num_rows: int = 0
    """States that there are."""

    @property
    def fixed_bytes(self) -> int:
        """Of the device: all slots, what nobody keeps, exact pages, and states of layers."""
        scratch = self.scratch_pages * (self.page_bytes + self.state_page_bytes)
        states = self.num_rows * self.row_bytes
        return scratch + self.max_num_seqs * self.slot_bytes + self.exact_bytes + states

    @property
    def least_bytes(self) -> int:
        """Of the device: one sequence of the greatest length, and all slots."""
        pages = self.pages * (self.page_bytes + self.upper_page_bytes) + self.state_pages * self.state_page_bytes
        return pages + self.fixed_bytes

    def upper_pages_beside(self, num_pages: int) -> int:
        """Return the upper pages that go with ``num_pages`` others: ``UPPER_SHARE`` of them, but enough for one
        sequence of the greatest length that is generated all through; 0 without a blind cut."""
        if not self.upper_page_bytes:
            return 0
        return max(-(-num_pages // UPPER_SHARE), min(self.pages, num_pages))

    def divide(self, num_bytes: int) -> tuple[int, int]:
        """Return the K,V pages and the state pages that fit, where one sequence does, but no more than useful.

        The longest prompt fits exactly while it is computed. What is beyond that grows in the proportion in which
        such sequences need pages of both kinds once they are steady.
        """
        whole, num_bytes = num_bytes, num_bytes - self.fixed_bytes
        state_pages = int(self.has_state_pages)
        if self.state_pages:
            steady_bytes = self.state_pages * self.state_page_bytes + self.steady_pages * self.page_bytes
            spare = num_bytes - (self.pages - self.steady_pages) * self.page_bytes
            state_pages = min(spare * self.state_pages // steady_bytes, self.max_num_seqs * self.state_pages)
        num_pages = (num_bytes - state_pages * self.state_page_bytes) // self.page_bytes
        if self.upper_page_bytes:
            with_share = num_bytes * UPPER_SHARE // (UPPER_SHARE * self.page_bytes + self.upper_page_bytes)
            num_pages = min(with_share, (num_bytes - self.pages * self.upper_page_bytes) // self.page_bytes)
            while self.device_bytes(num_pages, state_pages, self.upper_pages_beside(num_pages)) > whole:
                num_pages -= 1  # its upper pages are rounded up
        return min(num_pages, self.max_num_seqs * self.pages), state_pages

    def device_bytes(self, num_pages: int, num_state_pages: int, num_upper_pages: int = 0) -> int:
        """Return the bytes of so many pages, and ``fixed_bytes``."""
        upper_bytes = num_upper_pages * self.upper_page_bytes
        return num_pages * self.page_bytes + upper_bytes + num_state_pages * self.state_page_bytes + self.fixed_bytes


def cache_shape(manifest: Manifest, max_num_seqs: int, max_seq_len: int, num_rows: int = 0) -> CacheShape:
    """Return what ``max_num_seqs`` sequences of up to ``max_seq_len`` tokens take of an engine's cache, with
    ``num_rows`` states."""
    policy, page_size = manifest.policy, manifest.page_size
    pools = manifest.cache_layout.state_pools
    in_pages = [pool for pool in pools if pool.rows == "pages"]
    element = manifest.owner_cache.element_bytes
    # All prompt, or all generated: whichever needs more.
    longest = max(policy.max_cached(max_seq_len, max_seq_len), policy.max_cached(1, max_seq_len))

    def num_bytes(some: Iterable[StatePool], on_host: bool) -> int:
        return manifest.model.num_owners * sum(_row_bytes(pool, element) for pool in some if pool.on_host == on_host)

    return CacheShape(
        max_num_seqs,
        -(-longest // page_size),
        -(-policy.num_cached(max_seq_len, max_seq_len) // page_size),
        manifest.page_bytes,
        policy.keeping.num_state_pages(max_seq_len, page_size),
        num_bytes(in_pages, False),
        num_bytes(in_pages, True),
        num_bytes((pool for pool in pools if pool.rows == "sequences"), False),
        bool(in_pages),
        0 if policy.probing is None else policy.probing.num_scratch_pages(page_size),
        manifest.upper_page_bytes,
        manifest.num_exact_pages(max_num_seqs) * manifest.exact_page_bytes,
        manifest.state_bytes,
        num_rows,
    )


def _row_bytes(pool: StatePool, element_bytes: int) -> int:
    size = np.dtype(pool.dtype).itemsize if pool.dtype else element_bytes
    return math.prod(pool.shape) * size
