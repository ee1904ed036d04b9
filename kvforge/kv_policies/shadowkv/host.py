"""The values of prompts, which ShadowKV keeps in the host's memory."""

from dataclasses import dataclass

from kvforge.kv_policies.capabilities.host_tier import HostTier
from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.shadowkv.chunks import PromptChunks


@dataclass(frozen=True)
class HostValues(HostTier):
    """V of whole pages of prompts that are factored."""

    chunks: PromptChunks

    def num_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        is_factored = self.chunks.is_factored(num_prompt_tokens)
        return cache.padded(num_prompt_tokens) * _value_bytes(cache) if is_factored else 0

    def num_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """V of the selected tokens, as if no chunk had been there."""
        if not self.chunks.is_factored(num_prompt_tokens):
            return 0
        return self.chunks.num_selected(num_prompt_tokens) * self.chunks.chunk_size * _value_bytes(cache)


def _value_bytes(cache: OwnerCache) -> int:
    return cache.num_kv_heads * cache.head_dim * cache.element_bytes
