"""ShadowKV (arXiv 2410.21465): low-rank keys on the device, values on the host, attention over a few chunks."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.errors import BuildError
from kvforge.kv_policies.policy import KVPolicy, Need, OwnerCache

LARGEST = 2**20
"""No parameter may exceed this."""


@dataclass(frozen=True)
class ShadowKV(KVPolicy):
    """Once a prompt of S tokens is computed exactly, its keys become rank-``rank`` factors of the keys before RoPE, its
    values move to the host, and each decode step attends to

        [selected: ``sparse_budget`` tokens | outliers | tail | generated tokens]

    in this order in the pages of its *compact* cache. The first S - tail tokens are chunks of ``chunk_size``; the tail
    is ``num_local_tokens`` and what does not fill a chunk. Per KV head ``num_outlier_chunks`` chunks stay exact, the
    rest is selected from. A prompt with too few chunks for that to leave anything out stays as it is.

    Raises:
        BuildError: a parameter that is not positive (``num_outlier_chunks`` and ``num_local_tokens`` may be 0), above
            ``LARGEST``, or a budget that is no multiple of the chunk.
    """

    rank: int = 160
    chunk_size: int = 8
    sparse_budget: int = 2048
    num_outlier_chunks: int = 48
    num_local_tokens: int = 32

    name: ClassVar[str] = "shadowkv"
    needs: ClassVar[frozenset[Need]] = frozenset(
        {
            Need.WHOLE_PROMPT,
            Need.EXACT_PROMPT,
            Need.CACHE_PER_LAYER,
            Need.ONE_QUERY,
            Need.PLAIN_ELEMENTS,
            Need.GLOBAL_ATTENTION,
            Need.SEQUENCE_STATE,
        }
    )

    def __post_init__(self) -> None:
        for name, value in self.parameters.items():
            least = 0 if name in ("num_outlier_chunks", "num_local_tokens") else 1
            if not least <= value <= LARGEST:
                bound = f"at least {least}" if value < least else f"at most {LARGEST}"
                raise BuildError(f"{self.name}: {name} is {value}; give {bound}.")
        if self.sparse_budget % self.chunk_size:
            raise BuildError(
                f"{self.name}: sparse_budget {self.sparse_budget} is no multiple of chunk_size {self.chunk_size}; "
                "give whole chunks."
            )

    @property
    def max_selected(self) -> int:
        """Chunks that a KV head selects in one step, at most: the places for them in the compact cache."""
        return self.sparse_budget // self.chunk_size

    def num_chunks(self, num_prompt_tokens: int) -> int:
        """Return the chunks of a prompt."""
        return max(num_prompt_tokens - self.num_local_tokens, 0) // self.chunk_size

    def num_selected(self, num_prompt_tokens: int) -> int:
        """Return the chunks that a KV head selects of a prompt: ``max_selected``, or all that are no outliers."""
        return min(self.max_selected, max(self.num_chunks(num_prompt_tokens) - self.num_outlier_chunks, 0))

    def is_factored(self, num_prompt_tokens: int) -> bool:
        """Whether a prompt has more chunks than stay exact or are selected; else it stays as it is."""
        return self.num_chunks(num_prompt_tokens) > self.num_outlier_chunks + self.max_selected

    def tail_length(self, num_prompt_tokens: int) -> int:
        """Return the tokens at a prompt's end that belong to no chunk."""
        return num_prompt_tokens - self.num_chunks(num_prompt_tokens) * self.chunk_size

    def compact_length(self, num_prompt_tokens: int) -> int:
        """Return the tokens of a prompt that stay in pages: selected, outliers and tail; all where none is factored.

        A generated token at position p has the cache index p + compact length - prompt length.
        """
        if not self.is_factored(num_prompt_tokens):
            return num_prompt_tokens
        chunks = self.num_selected(num_prompt_tokens) + self.num_outlier_chunks
        return chunks * self.chunk_size + self.tail_length(num_prompt_tokens)

    def check(self, num_kv_heads: int, head_dim: int, page_size: int) -> None:
        """Raise BuildError unless the keys of all heads have that many dimensions, and a page holds whole chunks."""
        if self.rank > num_kv_heads * head_dim:
            raise BuildError(
                f"{self.name}: rank {self.rank} exceeds the {num_kv_heads * head_dim} dimensions of a token's keys; "
                f"give at most {num_kv_heads * head_dim}."
            )
        if page_size % self.chunk_size:
            raise BuildError(
                f"--page-size {page_size} is no multiple of {self.name}'s chunk_size {self.chunk_size}; give one that "
                "is."
            )

    def num_shadow_pages(self, num_prompt_tokens: int, page_size: int) -> int:
        """Return the pages of U, landmarks and host values that a prompt takes: one for ``page_size`` tokens; 0 where
        it is not factored."""
        return -(-num_prompt_tokens // page_size) if self.is_factored(num_prompt_tokens) else 0

    def device_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """U of whole pages, SV, landmarks and outlier marks of whole pages, the chunk in each place and two counts of
        a head, compact pages."""
        length = self.compact_length(num_prompt_tokens) + num_generated_tokens
        compact = cache.padded(length) * cache.token_bytes
        if not self.is_factored(num_prompt_tokens):
            return compact
        heads, element_bytes = cache.num_kv_heads, cache.element_bytes
        tokens = self.num_shadow_pages(num_prompt_tokens, cache.page_size) * cache.page_size
        u = tokens * self.rank * element_bytes
        sv = self.rank * heads * cache.head_dim * element_bytes
        landmarks = tokens // self.chunk_size * heads * (cache.head_dim * element_bytes + 1)
        return u + sv + landmarks + heads * (4 * self.max_selected + 16) + compact

    def prefill_bytes(self, cache: OwnerCache, num_prompt_tokens: int) -> int:
        """Pages of the whole prompt, less those of its compact cache, which take their place."""
        compact = cache.padded(self.compact_length(num_prompt_tokens))
        return (cache.padded(num_prompt_tokens) - compact) * cache.token_bytes

    def host_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """V of whole pages."""
        tokens = self.num_shadow_pages(num_prompt_tokens, cache.page_size) * cache.page_size
        return tokens * cache.num_kv_heads * cache.head_dim * cache.element_bytes

    def device_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Landmarks and outlier marks, SV, U of the selected tokens as if no chunk had been there, compact K,V."""
        compact = (self.compact_length(num_prompt_tokens) + num_generated_tokens) * cache.token_bytes
        if not self.is_factored(num_prompt_tokens):
            return compact
        heads, element_bytes = cache.num_kv_heads, cache.element_bytes
        landmarks = self.num_chunks(num_prompt_tokens) * heads * (cache.head_dim * element_bytes + 1)
        sv = self.rank * heads * cache.head_dim * element_bytes
        u = self.num_selected(num_prompt_tokens) * self.chunk_size * heads * self.rank * element_bytes
        return landmarks + sv + u + compact

    def host_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """V of the selected tokens, as if no chunk had been there."""
        if not self.is_factored(num_prompt_tokens):
            return 0
        tokens = self.num_selected(num_prompt_tokens) * self.chunk_size
        return tokens * cache.num_kv_heads * cache.head_dim * cache.element_bytes
