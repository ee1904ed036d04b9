"""Physical pages: who holds them, which are free, and which are kept for their content."""

from collections.abc import Callable

from kvforge.runtime.scheduling.cached_pages import CachedPages

DEFAULT_PRIORITY = 35
"""TensorRT-LLM's default of a page's priority, 0 to 100."""


class PagePool:
    """Reference-counted page numbers 0 .. num_pages-1.

    Every page is in exactly one of three states: *free* (in ``free_pages``), *referenced*
    (``ref_counts > 0``), or *cached* (no holder, but its content may be reused; when no page is free, that of the
    lowest priority is evicted, and of several the one least recently used). ``evict`` is called with a cached page's
    number just before it is given away. All operations take constant time.
    """

    def __init__(self, num_pages: int, evict: Callable[[int], None] = lambda page: None) -> None:
        self.num_pages = num_pages
        self.ref_counts = [0] * num_pages
        self.free_pages = list(range(num_pages - 1, -1, -1))
        self.cached_pages = CachedPages()
        self.priorities = [DEFAULT_PRIORITY] * num_pages
        """What each page's content is worth; the default again for new content."""
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
            page = self.cached_pages.pop()
            self._evict(page)
        else:
            return None
        self.ref_counts[page] = 1
        self.priorities[page] = DEFAULT_PRIORITY
        return page

    def discard(self, page: int) -> None:
        """Free a cached page, whose content nobody may reuse from now on."""
        self.cached_pages.remove(page, self.priorities[page])
        self.free_pages.append(page)

    def share(self, page: int) -> None:
        """Add a holder to a referenced or cached page."""
        if self.ref_counts[page] == 0:
            self.cached_pages.remove(page, self.priorities[page])
        self.ref_counts[page] += 1

    def set_priority(self, page: int, priority: int) -> None:
        """Change what a referenced or cached page's content is worth; a cached one counts as just used."""
        cached = self.ref_counts[page] == 0
        if cached:
            self.cached_pages.remove(page, self.priorities[page])
        self.priorities[page] = priority
        if cached:
            self.cached_pages.add(page, priority)

    def release(self, page: int, keep: bool) -> None:
        """Drop a holder; a page without holders is cached if ``keep``, else free."""
        self.ref_counts[page] -= 1
        if self.ref_counts[page] == 0:
            if keep:
                self.cached_pages.add(page, self.priorities[page])
            else:
                self.free_pages.append(page)
