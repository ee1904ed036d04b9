"""A host tier: what is kept of a sequence in the host's memory, and fetched from there."""

from kvforge.kv_policies.owner_cache import OwnerCache


class HostTier:
    """Bytes of one sequence in one owner, as those of ``KVPolicy``. As it stands, that of a policy which keeps nothing
    there."""

    def host_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Return the bytes kept in the host's memory."""
        return 0

    def host_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Return the most bytes that a layer fetches from the host's memory for the next token."""
        return 0


NOTHING_ON_HOST = HostTier()
