"""Pages in main memory beside a plain list that says which should be there, and stores above each other."""

import random
from pathlib import Path

import pytest

from kvforge.prefix_store.page_store import StackedStores
from kvforge.runtime.prefixes.host_pages import HostPages
from tests.cpu.prefix_store.test_folder import SIZE, content, digest, opened
from tests.support.random_cases import Seeds


class PlainPages:
    """Pages as (priority, digest), those used last at the end."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages, self.pages = num_pages, []

    def place(self, name: bytes) -> int | None:
        return next((index for index, page in enumerate(self.pages) if page[1] == name), None)

    def write(self, name: bytes, priority: int) -> bool:
        if self.place(name) is not None:
            return True
        if len(self.pages) == self.num_pages:
            least = min(self.pages, key=lambda page: page[0], default=None)
            if least is None or least[0] > priority:
                return False
            self.pages.remove(least)
        self.pages.append((priority, name))
        return True

    def use(self, name: bytes, priority: int | None = None) -> bool:
        place = self.place(name)
        if place is not None:
            was, _ = self.pages.pop(place)
            self.pages.append((was if priority is None else priority, name))
        return place is not None


def read(store: HostPages | StackedStores, index: int) -> bool:
    found = memoryview(bytearray(SIZE))
    there = store.read(digest(index), found)
    assert not there or bytes(found) == content(index)
    return there


def test_random_uses_keep_what_the_plain_list_keeps(seeds: Seeds) -> None:
    for seed in seeds(40, 1000):
        rng = random.Random(seed)
        num_pages = rng.randint(0, 6)
        pages, plain = HostPages(SIZE, num_pages * SIZE + rng.randrange(SIZE)), PlainPages(num_pages)
        for _ in range(150):
            index, priority = rng.randrange(12), rng.choice((10, 35, 35, 80))
            match rng.choice(("write", "write", "read", "touch", "priority")):
                case "write":
                    data = memoryview(content(index))
                    assert pages.write(digest(index), priority, data) == plain.write(digest(index), priority), seed
                case "read":
                    assert read(pages, index) == plain.use(digest(index)), seed
                case "touch":
                    pages.touch([digest(index)])
                    plain.use(digest(index))
                case "priority":
                    pages.set_priority(digest(index), priority)
                    plain.use(digest(index), priority)
            assert len(pages) == len(plain.pages) <= num_pages, seed
            assert all((digest(i) in pages) == (plain.place(digest(i)) is not None) for i in range(12)), seed


def test_what_the_upper_store_gives_up_is_in_the_lower_one(tmp_path: Path) -> None:
    upper, lower = HostPages(SIZE, 2 * SIZE), opened(tmp_path)
    store = StackedStores([upper, lower])
    for index in range(4):
        assert store.write(digest(index), 35, memoryview(content(index)))
    assert [digest(index) in upper for index in range(4)] == [False, False, True, True] and len(store) == 4
    assert all(read(store, index) for index in range(4)) and not read(store, 4)
    store.set_priority(digest(3), 90)
    store.touch([digest(2), digest(3)])
    store.refresh()
    assert sorted(path.name[-8:-5] for path in lower.path.glob("*.page")) == ["035", "035", "035", "090"]
    for index in (5, 6, 7):
        assert store.write(digest(index), 35, memoryview(content(index)))
    assert [digest(index) in upper for index in (2, 3, 7)] == [False, True, True]


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(MemoryError):
        HostPages(2**20, 2**62)
