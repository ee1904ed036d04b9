"""The bytes of a page in an engine's pools."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from kvforge.manifest import Manifest
from kvforge.runtime.sessions.pools import Pools

Row = np.ndarray
"""What a pool has of every page, uint8 ``[pages, bytes]``."""

Place = tuple[int, int]
"""Where a piece begins: in memory, of the first page; in a page's content."""


class PageMemory:
    """Views of the pools by page: of each owner all tensors with a row for every page, which is what a prefix that is
    reused consists of, one after the other. Exact pages of policies that seal pages are no part of it. The pools are in
    main memory.

    A page is copied in a few calls, without the interpreter's lock: pages that nobody has touched take the kernel
    milliseconds, in which steps go on.
    """

    def __init__(self, manifest: Manifest, pools: Pools) -> None:
        rows = [tensor.numpy() for tensor in page_rows(manifest, pools)]
        starts = [0, *itertools.accumulate(row.shape[1] for row in rows)]
        self.page_bytes = starts.pop()
        addresses = (int(row.__array_interface__["data"][0]) for row in rows)
        places = list(zip(addresses, starts, strict=True))
        self._parts = []
        for run in _runs([row.shape for row in rows], places):
            first, last, num_apart = run[0], run[-1], max(len(run) - 1, 1)
            pages, width = rows[first].shape
            in_pools, in_content = (whole // num_apart for whole in _distance(places, first, last))
            pieces = as_strided(rows[first], (pages, len(run), width), (width, in_pools, 1))
            self._parts.append((pieces, starts[first], in_content))

    def copy(self, page: int, content: memoryview) -> None:
        """Overwrite ``content``, ``page_bytes`` bytes, with a page."""
        for in_pool, in_content in self._pieces(page, content):
            np.copyto(in_content, in_pool)

    def fill(self, page: int, content: memoryview) -> None:
        """Overwrite a page with ``content``."""
        for in_pool, in_content in self._pieces(page, content):
            np.copyto(in_pool, in_content)

    def _pieces(self, page: int, content: memoryview) -> Iterator[tuple[Row, Row]]:
        whole = np.frombuffer(content, np.uint8, self.page_bytes)
        for in_pools, start, apart in self._parts:
            yield in_pools[page], as_strided(whole[start:], in_pools.shape[1:], (apart, 1))


def _runs(shapes: Sequence[tuple[int, ...]], places: Sequence[Place]) -> list[range]:
    """Return indices of pieces of one shape that lie at one distance from each other: as few runs as there are where
    owners are alike, one for each piece where none is."""
    found = []
    for period in range(1, len(shapes) + 1):
        runs: list[range] = []
        for first in range(period):
            start = first
            for index in range(first + period, len(shapes) + period, period):
                if index >= len(shapes) or not (
                    shapes[index] == shapes[start]
                    and _distance(places, index - period, index) == _distance(places, start, start + period)
                ):
                    runs.append(range(start, min(index, len(shapes)), period))
                    start = index
        found.append(runs)
        if len(runs) == period:  # no longer period has fewer
            break
    return min(found, key=len)


def _distance(places: Sequence[Place], one: int, other: int) -> Place:
    return places[other][0] - places[one][0], places[other][1] - places[one][1]


def page_rows(manifest: Manifest, pools: Pools) -> Iterator[Tensor]:
    """Yield what a prefix that is reused consists of: views ``[pages, bytes]`` uint8 of the pools."""
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
