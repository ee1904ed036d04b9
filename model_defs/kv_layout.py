"""Which layer owns the K,V cache that a layer reads, and where its pages begin."""

from collections.abc import Collection

NO_OWNER = -1
"""In a table of owners, what a layer without K and V has."""


def owner_table(num_layers: int, cut: int, group_size: int) -> tuple[int, ...]:
    """Return the owner layer of every layer.

    Layers below ``cut`` own their cache; above it, group leaders at ``cut``, ``cut + group_size``, … own one
    for their group (AcrossKV, arXiv 2410.03960 section 3.3). The last group may be ragged.
    """
    return tuple(
        layer if layer < cut else cut + (layer - cut) // group_size * group_size for layer in range(num_layers)
    )


def hybrid_owner_table(num_layers: int, cut: int, group_size: int, without: Collection[int]) -> tuple[int, ...]:
    """Return the same where the layers ``without`` have no cache: above ``cut`` groups are of the others alone."""
    above = [layer for layer in range(cut, num_layers) if layer not in without]
    owners = {layer: above[index // group_size * group_size] for index, layer in enumerate(above)}
    return tuple(NO_OWNER if layer in without else owners.get(layer, layer) for layer in range(num_layers))


def first_page(owner: int, num_pages: int, num_owners: int) -> int:
    """Return where the pages of the owner at an index begin in a pool of ``num_pages`` that all owners share."""
    return owner * (num_pages // num_owners)
