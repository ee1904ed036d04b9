"""ShadowKV (arXiv 2410.21465): low-rank keys on the device, values on the host, attention over a few chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvforge.common.errors import BuildError
from kvforge.kv_policies.capabilities import HostTier, Insertion, Keeping
from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.policy import BASIC_NEEDS, KVPolicy, Need, check_parameters
from kvforge.kv_policies.shadowkv.chunks import PromptChunks
from kvforge.kv_policies.state import EngineMemory, InputBuilder, LayerCheck, PolicyState, StateInput, StatePool


@dataclass(frozen=True)
class ShadowKV(PromptChunks, Keeping, Insertion, HostTier, KVPolicy):
    """Once a prompt of S tokens is computed exactly, its keys become rank-``rank`` factors of the keys before RoPE, its
    values move to the host, and each decode step attends to

        [selected: ``sparse_budget`` tokens | outliers | tail | generated tokens]

    in this order in the pages of its *compact* cache. The first S - tail tokens are chunks of ``chunk_size``; the tail
    is ``num_local_tokens`` and what does not fill a chunk. Per KV head ``num_outlier_chunks`` chunks stay exact, the
    rest is selected from. A prompt with too few chunks for that to leave anything out stays as it is.

    Raises:
        BuildError: a parameter that is not positive (``num_outlier_chunks`` and ``num_local_tokens`` may be 0), above
            ``MAX_PARAMETER``, or a budget that is no multiple of the chunk.
    """

    name: ClassVar[str] = "shadowkv"
    title: ClassVar[str] = "ShadowKV"
    needs: ClassVar[frozenset[Need]] = BASIC_NEEDS.union(
        {
            Need.WHOLE_PROMPT,
            Need.CACHE_PER_LAYER,
            Need.ONE_QUERY,
            Need.PLAIN_ELEMENTS,
            Need.GLOBAL_ATTENTION,
        }
    )
    slot_columns: ClassVar[tuple[str, ...]] = ("num_chunks", "num_selected")
    state_inputs: ClassVar[tuple[StateInput, ...]] = (
        StateInput("shadow_slot", neutral=-1),
        StateInput("shadow_table", is_table=True),
        StateInput("num_chunks"),
        StateInput("num_selected"),
    )
    """Each sequence's row of sv, cached and counts; its pages of u, landmarks, is_outlier and host_v; its chunks, and
    how many of them are to be chosen."""
    operators: ClassVar[tuple[str, ...]] = (
        "kvforge::landmark_select",
        "kvforge::chunk_cache_update",
        "kvforge::selected_kv_write",
    )
    counters: ClassVar[Mapping[str, str]] = {
        "selected_chunks": "Chunks that ShadowKV selected, of all KV heads and layers",
        "reused_chunks": "Selected chunks that were in place already",
    }
    report_columns: ClassVar[tuple[tuple[str, str, int, str], ...]] = (
        ("selected_chunks", "chunks", 9, ""),
        ("chunk_hit_rate", "in place", 9, ".1%"),
    )

    def __post_init__(self) -> None:
        check_parameters(self, optional=("num_outlier_chunks", "num_local_tokens"))
        if self.sparse_budget % self.chunk_size:
            raise BuildError(
                f"{self.name}: sparse_budget {self.sparse_budget} is no multiple of chunk_size {self.chunk_size}; "
                "give whole chunks."
            )

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

    def next_transition(self, num_prompt_tokens: int, num_computed: int) -> int | None:
        """The end of a prompt that is factored."""
        due = num_computed <= num_prompt_tokens and self.is_factored(num_prompt_tokens)
        return num_prompt_tokens if due else None

    def max_piece(self, num_prompt_tokens: int, num_computed: int) -> int | None:
        """One token at a time after a factored prompt: each selects its own chunks."""
        return 1 if num_computed >= num_prompt_tokens and self.is_factored(num_prompt_tokens) else None

    def num_cached(self, num_prompt_tokens: int, num_computed: int) -> int:
        """The compact cache, once the prompt is computed."""
        if num_computed < num_prompt_tokens:
            return num_computed
        return self.compact_length(num_prompt_tokens) + num_computed - num_prompt_tokens

    def max_cached(self, num_prompt_tokens: int, num_tokens: int, start: int = 0) -> int:
        """The whole prompt, or the compact cache with what is generated."""
        if num_tokens < num_prompt_tokens:
            return num_tokens
        compact = self.num_cached(num_prompt_tokens, num_tokens)
        return compact if start >= num_prompt_tokens else max(num_prompt_tokens, compact)

    def kept_pages(self, num_prompt_tokens: int, num_computed: int, page_size: int) -> Sequence[int]:
        """None: other sequences may read the prompt's, and the compact cache is written anew."""
        return ()

    def num_state_pages(self, num_prompt_tokens: int, page_size: int) -> int:
        """Pages of U, landmarks and host values: one for ``page_size`` tokens; 0 where a prompt is not factored."""
        return -(-num_prompt_tokens // page_size) if self.is_factored(num_prompt_tokens) else 0

    def slot_values(self, num_prompt_tokens: int, num_computed: int) -> tuple[int, ...]:
        if num_computed < num_prompt_tokens or not self.is_factored(num_prompt_tokens):
            return 0, 0
        return self.num_chunks(num_prompt_tokens), self.num_selected(num_prompt_tokens)

    def state_pools(self, cache: OwnerCache) -> tuple[StatePool, ...]:
        """u, landmarks, is_outlier, sv, cached (the chunk in each place), counts (chunks selected so far, and those
        that were in place) and host_v."""
        chunks = cache.page_size // self.chunk_size
        return (
            StatePool("u", "pages", (cache.page_size, self.rank)),
            StatePool("landmarks", "pages", (chunks, cache.num_kv_heads, cache.head_dim)),
            StatePool("is_outlier", "pages", (chunks, cache.num_kv_heads), "uint8"),
            StatePool("sv", "sequences", (cache.num_kv_heads, self.rank, cache.head_dim)),
            StatePool("cached", "sequences", (cache.num_kv_heads, self.max_selected), "int32", initial=-1),
            StatePool("counts", "sequences", (cache.num_kv_heads, 2), "int64"),
            StatePool("host_v", "pages", (cache.page_size, cache.num_kv_heads, cache.head_dim), on_host=True),
        )

    def layer_insertion(self) -> Any:
        """See ``model_defs.chunk_selection``."""
        from model_defs.chunk_selection import ChunkSelection

        return ChunkSelection(self.chunk_size, self.max_selected)

    def layer_check(self) -> LayerCheck:
        from kvforge.kv_policies.shadowkv.verify import SelectionCheck

        return SelectionCheck(self.operators, self.chunk_size, self.max_selected)

    def activation_bytes(self, num_heads: int, num_kv_heads: int, max_seq_len: int) -> int:
        """Every head's scores of all chunks and, of each KV head, the chunks that it selects, those that are missed and
        their places."""
        chunks = -(-max_seq_len // self.chunk_size)
        return 4 * (num_heads * chunks + 3 * num_kv_heads * self.max_selected)

    def make_input_builder(self, page_size: int, max_num_seqs: int, max_state_pages: int) -> InputBuilder:
        from kvforge.kv_policies.shadowkv.inputs import ShadowInputBuilder

        return ShadowInputBuilder(self.chunk_size, page_size, max_num_seqs, max_state_pages)

    def make_state(self, memory: EngineMemory) -> PolicyState:
        from kvforge.kv_policies.shadowkv.state import ShadowState

        return ShadowState(self, memory)

    def report(self, counters: Mapping[str, int]) -> dict[str, float]:
        """How many chunks were selected, and the share of them that was in place."""
        selected = counters["selected_chunks"]
        return {
            "selected_chunks": selected,
            "chunk_hit_rate": counters["reused_chunks"] / selected if selected else 0.0,
        }

    def device_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """U of whole pages, SV, landmarks and outlier marks of whole pages, the chunk in each place and two counts of
        a head, compact pages."""
        length = self.compact_length(num_prompt_tokens) + num_generated_tokens
        compact = cache.padded(length) * cache.token_bytes
        if not self.is_factored(num_prompt_tokens):
            return compact
        heads, element_bytes = cache.num_kv_heads, cache.element_bytes
        tokens = self.num_state_pages(num_prompt_tokens, cache.page_size) * cache.page_size
        u = tokens * self.rank * element_bytes
        sv = self.rank * heads * cache.head_dim * element_bytes
        landmarks = tokens // self.chunk_size * heads * (cache.head_dim * element_bytes + 1)
        return u + sv + landmarks + heads * (4 * self.max_selected + 16) + compact

    def prefill_bytes(self, cache: OwnerCache, num_prompt_tokens: int) -> int:
        """Pages of the whole prompt, less those of its compact cache, which take their place."""
        compact = cache.padded(self.compact_length(num_prompt_tokens))
        return (cache.padded(num_prompt_tokens) - compact) * cache.token_bytes

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

    def host_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """V of whole pages."""
        tokens = self.num_state_pages(num_prompt_tokens, cache.page_size) * cache.page_size
        return tokens * cache.num_kv_heads * cache.head_dim * cache.element_bytes

    def host_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """V of the selected tokens, as if no chunk had been there."""
        if not self.is_factored(num_prompt_tokens):
            return 0
        tokens = self.num_selected(num_prompt_tokens) * self.chunk_size
        return tokens * cache.num_kv_heads * cache.head_dim * cache.element_bytes
