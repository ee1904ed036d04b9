"""What a process asks of its C library, so that it keeps what it frees."""

from types import SimpleNamespace

import pytest

from kvforge.distill import heap


@pytest.mark.parametrize("takes_large", [True, False])
def test_a_library_that_takes_no_large_threshold_maps_nothing(monkeypatch, takes_large: bool) -> None:
    asked: list[tuple[int, int]] = []

    def mallopt(parameter: int, value: int) -> int:
        asked.append((parameter, value))
        return int(takes_large or parameter != heap.M_MMAP_THRESHOLD)

    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    heap.keep_freed_memory()
    none_mapped = [] if takes_large else [(heap.M_MMAP_MAX, 0)]
    largest = heap.LARGEST
    assert asked == [(heap.M_MMAP_THRESHOLD, largest), *none_mapped, (heap.M_TRIM_THRESHOLD, largest)]


def test_another_library_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())
    heap.keep_freed_memory()
