"""Which layer owns the K,V cache that a layer reads."""


def owner_table(num_layers: int, cut: int, group_size: int) -> tuple[int, ...]:
    """Return the owner layer of every layer.

    Layers below ``cut`` own their cache; above it, group leaders at ``cut``, ``cut + group_size``, … own one
    for their group (AcrossKV, arXiv 2410.03960 section 3.3). The last group may be ragged.
    """
    return tuple(
        layer if layer < cut else cut + (layer - cut) // group_size * group_size for layer in range(num_layers)
    )
