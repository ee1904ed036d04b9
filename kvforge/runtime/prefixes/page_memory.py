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


class PageMemory:
    """Views of the pools by page: of each owner all tensors with a row for every page, which is what a prefix that is
    reused consists of, one after the other. Exact pages of policies that seal pages are no part of it. The pools are in
    main memory.

    A page is copied in a few calls, without the interpreter's lock: pages that nobody has touched take the kernel
    milliseconds, in which steps go on.
    """

    def __init__(self, manifest: Manifest, pools: Pools) -> None:
        rows = [tensor.numpy() for tensor in _page_rows(manifest, pools)]
        starts = [0, *itertools.accumulate(row.shape[1] for row in rows)]
        self.page_bytes = starts.pop()
        self._parts = []
        for run in _runs(rows):
            first, last, num_apart = run[0], run[-1], max(len(run) - 1, 1)
            pages, width = rows[first].shape
            in_pools = (_address(rows[last]) - _address(rows[first])) // num_apart
            in_content = (starts[last] - starts[first]) // num_apart
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


def _runs(rows: Sequence[Row]) -> list[range]:
    """Return indices of rows of one width that lie at one distance from each other in memory: as few runs as there are
    where owners are alike, one for each row where none is."""
    found = []
    for period in range(1, len(rows) + 1):
        runs: list[range] = []
        for first in range(period):
            start = first
            for index in range(first + period, len(rows) + period, period):
                if index >= len(rows) or not _goes_on(rows, start, index, period):
                    runs.append(range(start, min(index, len(rows)), period))
                    start = index
        found.append(runs)
        if len(runs) == period:  # no longer period has fewer
            break
    return min(found, key=len)


def _goes_on(rows: Sequence[Row], start: int, index: int, period: int) -> bool:
    one, other = rows[index - period], rows[index]
    distance = _address(rows[start + period]) - _address(rows[start])
    return one.shape == other.shape and _address(other) - _address(one) == distance


def _address(row: Row) -> int:
    return int(row.__array_interface__["data"][0])


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
