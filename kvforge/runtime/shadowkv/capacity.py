"""How the memory of the cache is divided into K,V pages and shadow pages."""

from dataclasses import dataclass

from kvforge.engine import Manifest
from kvforge.kv_policies import ShadowKV


@dataclass(frozen=True)
class CacheShape:
    """What sequences of the greatest length take of the cache, in pages and bytes over all owners.

    ``pages`` hold such a sequence's K,V, ``compact_pages`` its compact cache if it is prompt all through; without
    ShadowKV the two are the same, and shadow pages and slots take nothing.
    """

    max_num_seqs: int
    pages: int
    compact_pages: int
    page_bytes: int
    shadow_page_bytes: int = 0
    """Of the device, of a page of u, landmarks and outlier marks."""
    host_page_bytes: int = 0
    """Of the host, of a page of values."""
    slot_bytes: int = 0
    """Of the device, of sv, the chunks in their places and their counts of one sequence."""

    @property
    def can_factor(self) -> bool:
        """A prompt can be so long that it is factored."""
        return self.compact_pages < self.pages

    @property
    def least_bytes(self) -> int:
        """Of the device: one sequence of the greatest length, and all slots."""
        return self.pages * (self.page_bytes + self.shadow_page_bytes) + self.max_num_seqs * self.slot_bytes

    def divide(self, num_bytes: int) -> tuple[int, int]:
        """Return the K,V pages and the shadow pages that fit, where one sequence does, but no more than useful.

        The longest prompt fits exactly while it is computed. What is beyond that grows in the proportion in which
        factored prompts of that length need pages of both kinds.
        """
        num_bytes -= self.max_num_seqs * self.slot_bytes
        most, shadow_pages = self.max_num_seqs * self.pages, int(self.shadow_page_bytes > 0)
        if self.can_factor:
            factored_bytes = self.pages * self.shadow_page_bytes + self.compact_pages * self.page_bytes
            spare = num_bytes - (self.pages - self.compact_pages) * self.page_bytes
            shadow_pages = min(spare * self.pages // factored_bytes, most)
        return min((num_bytes - shadow_pages * self.shadow_page_bytes) // self.page_bytes, most), shadow_pages

    def device_bytes(self, num_pages: int, num_shadow_pages: int) -> int:
        """Return the bytes of so many pages and all slots."""
        pages = num_pages * self.page_bytes + num_shadow_pages * self.shadow_page_bytes
        return pages + self.max_num_seqs * self.slot_bytes


def cache_shape(manifest: Manifest, max_num_seqs: int, max_seq_len: int) -> CacheShape:
    """Return what ``max_num_seqs`` sequences of up to ``max_seq_len`` tokens take of an engine's cache."""
    policy, cache, owners = manifest.policy, manifest.owner_cache, manifest.num_owners
    pages = -(-max_seq_len // manifest.page_size)
    if not isinstance(policy, ShadowKV):
        return CacheShape(max_num_seqs, pages, pages, manifest.page_bytes)
    # The shortest prompt that is factored, and one that is a page longer: that page is all that the latter has more.
    length = (policy.num_outlier_chunks + policy.max_selected + 1) * policy.chunk_size + policy.num_local_tokens
    held = policy.device_bytes(cache, length)
    page = policy.device_bytes(cache, length + manifest.page_size) - held
    compact = cache.padded(policy.compact_length(length)) * cache.token_bytes
    return CacheShape(
        max_num_seqs,
        pages,
        -(-policy.compact_length(max_seq_len) // manifest.page_size) if policy.is_factored(max_seq_len) else pages,
        manifest.page_bytes,
        owners * page,
        owners * (policy.host_bytes(cache, length + manifest.page_size) - policy.host_bytes(cache, length)),
        owners * (held - compact - policy.num_shadow_pages(length, manifest.page_size) * page),
    )
