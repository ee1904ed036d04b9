"""The bytes of a page in an engine's pools."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvforge.manifest import Manifest
from kvforge.runtime.sessions.pools import Pools


class PageMemory:
    """Views of the pools by page: of each owner all tensors with a row for every page, which is what a prefix that is
    reused consists of. Exact pages of policies that seal pages are no part of it. The pools are in main memory.

    Pieces are copied with the interpreter's lock held: some microseconds each, where giving it back and waiting for it
    as often would cost the steps more.
    """

    def __init__(self, manifest: Manifest, pools: Pools) -> None:
        self._rows = [(rows.shape[1], memoryview(rows.numpy()).cast("B")) for rows in _page_rows(manifest, pools)]
        self.page_bytes = sum(width for width, _ in self._rows)

    def copy(self, page: int, content: memoryview) -> None:
        """Overwrite ``content``, ``page_bytes`` bytes, with a page."""
        start = 0
        for width, memory in self._rows:
            content[start : start + width] = memory[page * width : (page + 1) * width]
            start += width

    def fill(self, page: int, content: memoryview) -> None:
        """Overwrite a page with ``content``."""
        start = 0
        for width, memory in self._rows:
            memory[page * width : (page + 1) * width] = content[start : start + width]
            start += width


def _page_rows(manifest: Manifest, pools: Pools) -> Iterator[Tensor]:
    """Yield tensors ``[pages, bytes]`` uint8."""
    policy, more = manifest.policy, manifest.cache_layout.state_pools
    for index, pool in enumerate(pools):
        own = pool[: len(pool) - len(more)]
        if policy.insertion.owners_share:
            for tensor in own if index == 0 else ():
                yield from _as_bytes(tensor).chunk(len(manifest.model.owners))
        elif policy.sealing is None:
            yield from map(_as_bytes, own)
        for tensor, one in zip(pool[len(own) :], more, strict=True):
            if one.rows == "cache":
                yield _as_bytes(tensor)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8).view(len(tensor), -1)
