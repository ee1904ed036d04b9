"""What a process asks of its C library, so that it keeps what it frees."""

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvforge.common import heap


@pytest.mark.parametrize("takes_large", [True, False])
@pytest.mark.parametrize(("largest", "kept"), [(heap.LARGEST, heap.LARGEST), (2**28, 2**30)])
def test_a_library_that_takes_no_large_threshold_maps_nothing(
    monkeypatch, takes_large: bool, largest: int, kept: int
) -> None:
    asked: list[tuple[int, int]] = []

    def mallopt(parameter: int, value: int) -> int:
        asked.append((parameter, value))
        return int(takes_large or parameter != heap.M_MMAP_THRESHOLD)

    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    heap.keep_freed_memory(largest)
    none_mapped = [] if takes_large else [(heap.M_MMAP_MAX, 0)]
    assert asked == [(heap.M_MMAP_THRESHOLD, largest), *none_mapped, (heap.M_TRIM_THRESHOLD, kept)]


def test_another_library_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())
    heap.keep_freed_memory()


FAULTS = """
import resource
from kvforge.common.heap import keep_freed_memory
keep_freed_memory(2**28)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(2**26)
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_a_block_that_was_freed_is_not_mapped_anew() -> None:
    found = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
    first, again = map(int, found.split())
    assert again < 100 and again < first, "of 4 KiB, 16384 are a block"
