"""Exact attention to a query's own page and to sealed pages before it."""

from dataclasses import dataclass
from typing import Any, ClassVar

from kvforge.common.errors import BuildError
from kvforge.common.number_formats import GROUP_SIZE
from kvforge.kv_policies.capabilities import Insertion, Keeping, Sealing
from kvforge.kv_policies.full import Full
from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.state import InputBuilder, StateInput, StatePool


@dataclass(frozen=True)
class SealedPages(Keeping, Insertion, Sealing, Full):
    """What ``full`` is where the cache has groups (``kivi4``, ``kivi3``, ``kivi2``): a step writes K and V to exact
    pages and seals those that it fills. A query at position p reads page p // page_size exactly and the pages before it
    sealed, whatever it is computed with.

    A sequence has exact pages for the tokens that a step computes of it, and between steps one where its newest page is
    not full. A page keeps its exact one until all its tokens are there for good: where drafts filled it and are not
    accepted, the tokens that follow are written over them, and it is sealed again before anybody reads it.
    """

    state_inputs: ClassVar[tuple[StateInput, ...]] = (StateInput("exact_table", is_table=True, by_pages=True),)
    """The exact page of each logical page that a step writes."""
    operators: ClassVar[tuple[str, ...]] = ("kvforge::seal_pages", "kvforge::grouped_attention")

    def check(self, num_kv_heads: int, head_dim: int, page_size: int) -> None:
        for name, value in (("--page-size", page_size), ("the model's head_dim", head_dim)):
            if value % GROUP_SIZE:
                raise BuildError(
                    f"--kv-dtype kivi2, kivi3 and kivi4 have groups of {GROUP_SIZE} numbers, but {name} is {value}; "
                    + ("give a multiple." if name.startswith("--") else "give --kv-dtype int4.")
                )

    def device_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        sealed = super().device_bytes(cache, num_prompt_tokens, num_generated_tokens)
        return sealed + self.num_exact_pages(1, 0, cache.page_size) * cache.page_size * cache.exact_token_bytes

    def device_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        num_exact = (num_prompt_tokens + num_generated_tokens) % cache.page_size
        num_sealed = num_prompt_tokens + num_generated_tokens - num_exact
        return num_sealed * cache.token_bytes + num_exact * cache.exact_token_bytes

    def state_pools(self, cache: OwnerCache) -> tuple[StatePool, ...]:
        """Codes, in tiles of 16 by 16, and the groups' least numbers and steps of K and of V: the ``sealed_shapes`` of
        ``plugins.seal_pages.layout``."""
        page, heads, dim, tile = cache.page_size, cache.num_kv_heads, cache.head_dim, 32 * cache.element_bits
        return (
            StatePool("k_codes", "cache", (heads, page // 16, dim // 16, tile), "uint8"),
            StatePool("v_codes", "cache", (heads, dim // 16, page // 16, tile), "uint8"),
            StatePool("k_groups", "cache", (heads, page // GROUP_SIZE, 2, dim), "float16"),
            StatePool("v_groups", "cache", (heads, dim // GROUP_SIZE, 2, page), "float16"),
        )

    def layer_insertion(self) -> Any:
        """See ``model_defs.page_sealing``."""
        from model_defs.page_sealing import PageSealing

        return PageSealing(num_pools=len(self.named_pools))

    def make_input_builder(self, page_size: int, max_num_seqs: int, max_state_pages: int) -> InputBuilder:
        from kvforge.kv_policies.sealing.inputs import ExactTable

        return ExactTable(page_size)
