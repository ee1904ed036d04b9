"""Which full page holds which prefix: a chain of digests, one per full page."""

from collections import defaultdict
from collections.abc import Callable
from hashlib import blake2b

import numpy as np

from kvforge.runtime.requests.sequence import Sequence


def page_digest(parent: bytes, tokens: np.ndarray) -> bytes:
    """Digest of a page from its parent's digest and its own token ids, so that it names the whole prefix."""
    return blake2b(parent + np.ascontiguousarray(tokens, dtype=np.int32).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Published pages by digest. A page is published only after a step has written all of its K,V.

    The first page published under a digest stays; later equal pages remain private to their sequence. The
    cache lives and dies with one engine's pools: token ids and ``root``, the engine's KV policy with its parameters,
    name the content.
    """

    def __init__(self, page_size: int, root: str = "full") -> None:
        self.page_size = page_size
        self._root = page_digest(root.encode(), np.empty(0, dtype=np.int32))
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._epochs: defaultdict[int, int] = defaultdict(int)
        self.on_publish: Callable[[bytes, int], None] | None = None
        """Is told of each page that a step has filled."""
        self.on_forget: Callable[[int], None] | None = None
        """Is told of each page that is not published any more."""

    def __len__(self) -> int:
        return len(self._page_of)

    def lookup(self, sequence: Sequence) -> list[int]:
        """Return the pages of the longest published prefix that the sequence may take over."""
        num_pages = sequence.num_reusable // self.page_size
        pages: list[int] = []
        for index in range(num_pages):
            page = self.page_of(sequence, index)
            if page is None:
                break
            pages.append(page)
        return pages

    def page_of(self, sequence: Sequence, index: int) -> int | None:
        """Return the page published for the sequence's page ``index``, which its tokens fill; it may not hold it."""
        return self._page_of.get(self.digest(sequence, index))

    def publish(self, sequence: Sequence) -> None:
        """Publish the pages that ``sequence.num_computed`` tokens fill and that were not published before. What follows
        the first transition was computed of a changed cache: it is nobody else's, whether pages changed or not."""
        num_full = min(sequence.num_computed, sequence.first_transition) // self.page_size
        for index in range(sequence.num_published, num_full):
            digest = self.digest(sequence, index)
            page = sequence.pages[index]
            if digest not in self._page_of and page not in self._digest_of:
                self.adopt(digest, page)
                if self.on_publish is not None:
                    self.on_publish(digest, page)
        sequence.num_published = max(num_full, sequence.num_published)

    def adopt(self, digest: bytes, page: int) -> None:
        """Publish a page that holds the prefix with this digest, unless another one does."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def page_named(self, digest: bytes) -> int | None:
        """Return the page published under a digest."""
        return self._page_of.get(digest)

    def epoch(self, page: int) -> int:
        """Return how often a page was unpublished: between two equal answers a published page kept its content. Any
        thread may ask."""
        return self._epochs[page]

    def holds(self, page: int) -> bool:
        """The page is published."""
        return page in self._digest_of

    def forget(self, page: int) -> None:
        """Unpublish a page, because it is about to be overwritten."""
        self._epochs[page] += 1
        del self._page_of[self._digest_of.pop(page)]
        if self.on_forget is not None:
            self.on_forget(page)

    def digest(self, sequence: Sequence, index: int) -> bytes:
        """Return the name of the prefix that ends with the sequence's page ``index``, which its tokens fill."""
        digests = sequence.digests
        while len(digests) <= index:
            start = len(digests) * self.page_size
            parent = digests[-1] if digests else self._root
            digests.append(page_digest(parent, sequence.tokens[start : start + self.page_size]))
        return digests[index]
