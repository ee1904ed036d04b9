"""What a policy puts into the graphs: operators before a layer's attention, or in its place."""

from typing import Any, ClassVar

from kvforge.kv_policies.state import LayerCheck


class Insertion:
    """As it stands, that of a policy whose layers attend as the model's own."""

    views_pools: ClassVar[bool] = False
    """``layer_insertion`` attends to views of an owner's pools."""
    owners_share: ClassVar[bool] = False
    """What one owner gives up, another may use: K and V of all are in one pool, in which the pages of each owner follow
    those of the owner before."""

    @property
    def operators(self) -> tuple[str, ...]:
        """What ``layer_insertion`` calls before a layer's attention, in this order, and no other graph does."""
        return ()

    def layer_insertion(self) -> Any:
        """Return what layers call between a layer's rotated queries and its attention, a
        ``model_defs.cache_insertion.CacheInsertion``, or None."""
        return None

    def layer_check(self) -> LayerCheck | None:
        """Return the check of an exported layer that ``layer_insertion`` is in, None where there is none."""
        return None

    def activation_bytes(self, num_heads: int, num_kv_heads: int, max_seq_len: int) -> int:
        """Return the most bytes that ``layer_insertion`` holds of a sequence while a layer runs."""
        return 0


NOTHING_INSERTED = Insertion()
