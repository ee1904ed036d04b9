"""Exact attention: every token's K,V stays in its page."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.policy import KVPolicy, Need


@dataclass(frozen=True)
class Full(KVPolicy):
    """Every token's K,V stays where it was written."""

    name: ClassVar[str] = "full"
    title: ClassVar[str] = "full attention"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def device_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        return cache.padded(num_prompt_tokens + num_generated_tokens) * cache.token_bytes

    def device_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        return (num_prompt_tokens + num_generated_tokens) * cache.token_bytes
