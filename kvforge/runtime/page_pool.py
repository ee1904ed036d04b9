"""Physical pages: who holds them, which are free, and which are kept for their content."""

from collections import OrderedDict
from collections.abc import Callable


class PagePool:
    """Reference-counted page numbers 0 .. num_pages-1.

    Every page is in exactly one of three states: *free* (in ``free_pages``), *referenced*
    (``ref_counts > 0``), or *cached* (no holder, but its content may be reused; evicted least recently used
    first when no page is free). ``evict`` is called with a cached page's number just before it is given away.
    """

    def __init__(self, num_pages: int, evict: Callable[[int], None] = lambda page: None) -> None:
        self.num_pages = num_pages
        self.ref_counts = [0] * num_pages
        self.free_pages = list(range(num_pages - 1, -1, -1))
        self.cached_pages: OrderedDict[int, None] = OrderedDict()
        self._evict = evict

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` can hand out now."""
        return len(self.free_pages) + len(self.cached_pages)

    @property
    def num_used(self) -> int:
        """Pages with at least one holder."""
        return self.num_pages - self.num_available

    def allocate(self) -> int | None:
        """Return a page with one holder, or None when every page has one."""
        if self.free_pages:
            page = self.free_pages.pop()
        elif self.cached_pages:
            page, _ = self.cached_pages.popitem(last=False)
            self._evict(page)
        else:
            return None
        self.ref_counts[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a holder to a referenced or cached page."""
        if self.ref_counts[page] == 0:
            del self.cached_pages[page]
        self.ref_counts[page] += 1

    def release(self, page: int, keep: bool) -> None:
        """Drop a holder; a page without holders is cached if ``keep``, else free."""
        self.ref_counts[page] -= 1
        if self.ref_counts[page] == 0:
            if keep:
                self.cached_pages[page] = None
            else:
                self.free_pages.append(page)
