"""Which layer owns the K,V cache that a layer reads, and where its pages begin."""


def owner_table(num_layers: int, cut: int, group_size: int) -> tuple[int, ...]:
    """Return the owner layer of every layer.

    Layers below ``cut`` own their cache; above it, group leaders at ``cut``, ``cut + group_size``, … own one
    for their group (AcrossKV, arXiv 2410.03960 section 3.3). The last group may be ragged.
    """
    return tuple(
        layer if layer < cut else cut + (layer - cut) // group_size * group_size for layer in range(num_layers)
    )


def first_page(owner: int, num_pages: int, num_owners: int) -> int:
    """Return where the pages of the owner at an index begin in a pool of ``num_pages`` that all owners share."""
    return owner * (num_pages // num_owners)
