"""What keeps pages by the digest of their prefix, and several of these above each other."""

from collections.abc import Iterable, Sequence
from typing import Protocol


class PageStore(Protocol):
    """Pages by digest. Any thread may call any method; none raises for what a page cannot be kept or read for."""

    def __contains__(self, digest: bytes) -> bool:
        """Whether the page is there, as far as that is known without waiting."""

    def __len__(self) -> int:
        """How many there are."""

    def write(self, digest: bytes, priority: int, content: memoryview) -> bool:
        """Keep a page unless it is there; False where it is not afterwards."""

    def read(self, digest: bytes, content: memoryview) -> bool:
        """Fill ``content`` with a page, and note its use; False where that is not there or not sound."""

    def touch(self, digests: Iterable[bytes]) -> None:
        """Note that pages are used now."""

    def set_priority(self, digest: bytes, priority: int) -> None:
        """Change what a page is worth, where it is there."""

    def refresh(self) -> None:
        """Learn of the pages that others wrote and removed."""


class StackedStores:
    """A ``PageStore`` of several, the fastest first: each keeps what it has room for, the first that has a page gives
    it."""

    def __init__(self, stores: Sequence[PageStore]) -> None:
        self._stores = tuple(stores)

    def __contains__(self, digest: bytes) -> bool:
        return any(digest in store for store in self._stores)

    def __len__(self) -> int:
        return max(map(len, self._stores))

    def write(self, digest: bytes, priority: int, content: memoryview) -> bool:
        return any([store.write(digest, priority, content) for store in self._stores])

    def read(self, digest: bytes, content: memoryview) -> bool:
        return any(store.read(digest, content) for store in self._stores)

    def touch(self, digests: Iterable[bytes]) -> None:
        used = list(digests)
        for store in self._stores:
            store.touch(used)

    def set_priority(self, digest: bytes, priority: int) -> None:
        for store in self._stores:
            store.set_priority(digest, priority)

    def refresh(self) -> None:
        for store in self._stores:
            store.refresh()
