"""The cache of one owner, by its sizes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OwnerCache:
    """The cache of one owner: pages of ``page_size`` tokens, ``num_kv_heads`` heads of ``head_dim`` numbers for K and
    for V, each number in ``element_bits`` bits, on average over K and V; ``scale_bytes`` a token and head, for K and
    for V, beside them. It is asked by ``num_heads`` heads. Where pages are sealed, numbers of exact ones have
    ``exact_bits``. With one of ``vectors`` a token's K is its V as well."""

    num_kv_heads: int
    head_dim: int
    page_size: int
    element_bits: int
    scale_bytes: int = 0
    num_heads: int = 0
    exact_bits: int = 16
    vectors: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of K, V and their scales of one token."""
        return self.num_kv_heads * self.vectors * (self.head_dim * self.element_bits + 8 * self.scale_bytes) // 8

    @property
    def exact_token_bytes(self) -> int:
        """Bytes of K and V of one token in an exact page."""
        return self.vectors * self.num_kv_heads * self.head_dim * self.exact_bits // 8

    @property
    def element_bytes(self) -> int:
        """Bytes of a number, for policies that keep numbers of their own beside the cache: these take whole bytes."""
        return self.element_bits // 8

    def padded(self, num_tokens: int) -> int:
        """Return the tokens in the pages that hold ``num_tokens``."""
        return -(-num_tokens // self.page_size) * self.page_size
