"""How an engine's cache lies in memory: the tensors of each owner."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvforge.common.number_formats import ELEMENT_BYTES, KV_FORMATS, written_formats
from kvforge.costs.cache import owner_cache
from kvforge.kv_policies import KVPolicy, OwnerCache
from kvforge.kv_policies.state import StatePool
from model_defs import ModelConfig

Spec = tuple[tuple[int, ...], str]
"""Shape and torch's name of the dtype of a tensor."""


@dataclass(frozen=True)
class CacheLayout:
    """The cache of ``model`` in the format ``kv_dtype``, a key of ``KV_FORMATS``, computed in ``dtype``, in pages of
    ``page_size`` tokens, with what ``policy`` keeps besides."""

    model: ModelConfig
    kv_dtype: str
    dtype: str
    page_size: int
    policy: KVPolicy

    @property
    def owner_cache(self) -> OwnerCache:
        """The cache of one owner."""
        return owner_cache(self.model, self.kv_dtype, self.page_size, 8 * ELEMENT_BYTES[self.dtype])

    @property
    def state_pools(self) -> tuple[StatePool, ...]:
        """What the policy has of an owner."""
        return self.policy.keeping.state_pools(self.owner_cache)

    @property
    def added_page_bytes(self) -> int:
        """Bytes of a page over all owners that the policy has in it beside K and V."""
        own = () if self.policy.sealing is not None else self.state_pools
        added = [pool for pool in own if pool.rows == "cache"]
        return self.model.num_owners * sum(math.prod(pool.shape) * ELEMENT_BYTES[pool.dtype] for pool in added)

    def written(self, num_pages: int, owner: int) -> list[Spec]:
        """Return the tensors of the layer ``owner`` that a step writes to: K and V elements ``[num_pages, page_size,
        kv_heads, head_dim]``, of int4 half as many bytes, then, for dynamic formats, their float32 scales
        ``[num_pages, page_size, kv_heads]``. Latent attention has one of each, ``[num_pages, page_size, 1, width]``.
        """
        slots = (num_pages, self.page_size, self.model.num_kv_heads)
        formats = written_formats(self.kv_dtype, self.dtype)[: self.model.kv_vectors]
        head_dim = self.model.head_dim_of(owner)
        elements = [((*slots, one.stored_dim(head_dim)), one.torch_dtype) for one in formats]
        has_scales = KV_FORMATS[self.kv_dtype].scales == "dynamic"
        return [*elements, *([(slots, "float32")] * len(elements) if has_scales else [])]

    def linear_state(self, num_rows: int, layer: int) -> list[Spec]:
        """Return the tensors of a layer that keeps a state, for so many states (``model_defs.state_layers``)."""
        conv, *states = self.model.state_shapes_of(layer)
        return [((num_rows, *conv), self.dtype), *(((num_rows, *state), "float32") for state in states)]

    def state(self, rows: Mapping[str, int]) -> list[Spec]:
        """Return the tensors of ``state_pools``, for so many state ``pages``, ``sequences`` and pages of the
        ``cache``."""
        own = written_formats(self.kv_dtype, self.dtype)[0].torch_dtype
        return [((rows[pool.rows], *pool.shape), pool.dtype or own) for pool in self.state_pools]
