"""A KV policy in one file: the first tokens and the newest ones stay, pages between them are forgotten."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvforge.common.errors import BuildError
from kvforge.kv_policies import KVPolicy, Need, OwnerCache
from kvforge.kv_policies.policy import BASIC_NEEDS


@dataclass(frozen=True)
class Forgetting(KVPolicy):
    """When ``num_sinks + window + block`` tokens are cached, the oldest ``block`` after the sinks are forgotten.

    Raises:
        BuildError: a parameter that is not positive.
    """

    num_sinks: int = 8
    window: int = 16
    block: int = 8

    name: ClassVar[str] = "forgetting"
    title: ClassVar[str] = "forgotten pages"
    needs: ClassVar[frozenset[Need]] = BASIC_NEEDS | {Need.GLOBAL_ATTENTION, Need.ONE_QUERY}

    def __post_init__(self) -> None:
        for name, value in self.parameters.items():
            if value < 1:
                raise BuildError(f"{self.name}: {name} is {value}; give at least 1.")

    @property
    def limit(self) -> int:
        """Tokens of a cache at its largest."""
        return self.num_sinks + self.window + self.block

    def check(self, num_kv_heads: int, head_dim: int, page_size: int) -> None:
        for name, value in self.parameters.items():
            if value % page_size:
                raise BuildError(
                    f"{self.name}: {name} {value} is no multiple of --page-size {page_size}; give whole pages."
                )

    def next_transition(self, num_prompt_tokens: int, num_computed: int) -> int | None:
        blocks = max(-(-(num_computed - self.limit) // self.block), 0)
        return self.limit + blocks * self.block

    def num_cached(self, num_prompt_tokens: int, num_computed: int) -> int:
        if num_computed < self.limit:
            return num_computed
        return self.num_sinks + self.window + (num_computed - self.limit) % self.block

    def max_cached(self, num_prompt_tokens: int, num_tokens: int, start: int = 0) -> int:
        return min(self.num_cached(num_prompt_tokens, start) + num_tokens - start, self.limit)

    def kept_pages(self, num_prompt_tokens: int, num_computed: int, page_size: int) -> Sequence[int]:
        sinks, forgotten = self.num_sinks // page_size, self.block // page_size
        return (*range(sinks), *range(sinks + forgotten, self.limit // page_size))

    def device_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        num_cached = self.num_cached(num_prompt_tokens, num_prompt_tokens + num_generated_tokens)
        return cache.padded(num_cached) * cache.token_bytes

    def device_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        return self.max_cached(num_prompt_tokens, num_prompt_tokens + num_generated_tokens) * cache.token_bytes

    def visible(self, position: int) -> list[int]:
        """The positions that the token at ``position`` attends to: what the tests compare with."""
        num_cached = self.num_cached(0, position) + 1
        if num_cached == position + 1:
            return list(range(num_cached))
        return [*range(self.num_sinks), *range(position + 1 - (num_cached - self.num_sinks), position + 1)]
