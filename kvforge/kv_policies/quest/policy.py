"""Quest (arXiv 2406.10774): a decode step reads a part of the prompt's cache, chosen by bounds of its keys."""

from dataclasses import dataclass
from typing import Any, ClassVar

from kvforge.common.errors import BuildError
from kvforge.kv_policies.capabilities import Insertion, Keeping
from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.policy import BASIC_NEEDS, KVPolicy, Need, check_parameters
from kvforge.kv_policies.state import EngineMemory, InputBuilder, LayerCheck, PolicyState, StateInput, StatePool


@dataclass(frozen=True)
class Quest(Keeping, Insertion, KVPolicy):
    """Each KV head of a decode step reads ``budget`` tokens of the prompt's whole chunks of ``chunk_size`` tokens each:
    those with the largest bounds of their keys (section 3.3). It also reads the rest of the prompt and everything
    generated. A prompt of no more whole chunks is read as it is.

    Raises:
        BuildError: a parameter below 1 or above ``MAX_PARAMETER``, or a budget of parts of chunks.
    """

    budget: int = 1024
    chunk_size: int = 16

    name: ClassVar[str] = "quest"
    title: ClassVar[str] = "Quest"
    needs: ClassVar[frozenset[Need]] = BASIC_NEEDS.union(
        {
            Need.WHOLE_PROMPT,
            Need.CACHE_PER_LAYER,
            Need.ONE_QUERY,
            Need.PLAIN_ELEMENTS,
            Need.PER_HEAD_LENGTHS,
            Need.GLOBAL_ATTENTION,
        }
    )
    slot_columns: ClassVar[tuple[str, ...]] = ("num_chunks",)
    state_inputs: ClassVar[tuple[StateInput, ...]] = (
        StateInput("chunk_table", is_table=True),
        StateInput("num_chunks"),
    )
    """Each sequence's pages of bounds, and the chunks of its prompt."""
    operators: ClassVar[tuple[str, ...]] = ("kvforge::landmark_select",)
    views_pools: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_parameters(self)
        if self.budget % self.chunk_size:
            raise BuildError(
                f"{self.name}: budget {self.budget} is no multiple of chunk_size {self.chunk_size}; change one of them "
                "(chunk_size must divide --page-size too)."
            )

    def check(self, num_kv_heads: int, head_dim: int, page_size: int) -> None:
        if page_size % self.chunk_size:
            raise BuildError(
                f"--page-size {page_size} is no multiple of {self.name}'s chunk_size {self.chunk_size}; give one that "
                "is."
            )

    @property
    def max_selected(self) -> int:
        """Chunks that a KV head reads."""
        return self.budget // self.chunk_size

    def num_chunks(self, num_prompt_tokens: int) -> int:
        """Return the chunks of a prompt that are selected from, 0 where all of it is read."""
        chunks = num_prompt_tokens // self.chunk_size
        return chunks if chunks > self.max_selected else 0

    # -- numbers -----------------------------------------------------------------------------------------------

    def next_transition(self, num_prompt_tokens: int, num_computed: int) -> int | None:
        """The end of a prompt that is selected from."""
        due = num_computed <= num_prompt_tokens and self.num_chunks(num_prompt_tokens) > 0
        return num_prompt_tokens if due else None

    def max_piece(self, num_prompt_tokens: int, num_computed: int) -> int | None:
        """One token at a time after such a prompt: each selects its own chunks."""
        return 1 if num_computed >= num_prompt_tokens and self.num_chunks(num_prompt_tokens) else None

    def num_state_pages(self, num_prompt_tokens: int, page_size: int) -> int:
        """Pages of bounds: one for ``page_size`` tokens of a prompt that is selected from."""
        return -(-num_prompt_tokens // page_size) if self.num_chunks(num_prompt_tokens) else 0

    def slot_values(self, num_prompt_tokens: int, num_computed: int) -> tuple[int, ...]:
        return (self.num_chunks(num_prompt_tokens) if num_computed >= num_prompt_tokens else 0,)

    def device_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Every token, and the bounds of whole pages."""
        pages = self.num_state_pages(num_prompt_tokens, cache.page_size)
        bounds = pages * (cache.page_size // self.chunk_size) * self._chunk_bytes(cache)
        return cache.padded(num_prompt_tokens + num_generated_tokens) * cache.token_bytes + bounds

    def device_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """The bounds, what is selected, and what is behind the chunks."""
        chunks = self.num_chunks(num_prompt_tokens)
        left_out = (chunks - min(chunks, self.max_selected)) * self.chunk_size
        read = num_prompt_tokens + num_generated_tokens - left_out
        return read * cache.token_bytes + chunks * self._chunk_bytes(cache)

    def _chunk_bytes(self, cache: OwnerCache) -> int:
        return cache.num_kv_heads * (2 * cache.head_dim * cache.element_bytes + 1)

    # -- memory and graphs -------------------------------------------------------------------------------------

    def state_pools(self, cache: OwnerCache) -> tuple[StatePool, ...]:
        """bounds (the largest numbers of a chunk's keys, then the smallest) and never, which stays 0."""
        chunks = cache.page_size // self.chunk_size
        return (
            StatePool("bounds", "pages", (chunks, cache.num_kv_heads, 2 * cache.head_dim)),
            StatePool("never", "pages", (chunks, cache.num_kv_heads), "uint8"),
        )

    def layer_insertion(self) -> Any:
        """See ``model_defs.page_selection``."""
        from model_defs.page_selection import PageSelection

        return PageSelection(self.chunk_size, self.max_selected)

    def layer_check(self) -> LayerCheck:
        from kvforge.kv_policies.quest.verify import BoundsCheck

        return BoundsCheck(self.operators, self.max_selected)

    def activation_bytes(self, num_heads: int, num_kv_heads: int, max_seq_len: int) -> int:
        """Every head's scores of all chunks and, of each KV head, the chunks that it reads and their columns."""
        chunks = -(-max_seq_len // self.chunk_size)
        return 4 * (num_heads * chunks + num_kv_heads * (2 * self.max_selected + chunks))

    # -- at run time -------------------------------------------------------------------------------------------

    def make_input_builder(self, page_size: int, max_num_seqs: int, max_state_pages: int) -> InputBuilder:
        from kvforge.kv_policies.quest.inputs import ChunkInputs

        return ChunkInputs(self.chunk_size, page_size, max_num_seqs, max_state_pages)

    def make_state(self, memory: EngineMemory) -> PolicyState:
        from kvforge.kv_policies.quest.state import BoundsState

        return BoundsState(self.chunk_size, memory)
