"""Files that are written past the page cache: what stands in them, and what a failure says."""

import errno
import fcntl
import mmap
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvforge.tensorrt import direct_file
from kvforge.tensorrt.direct_file import DirectFile

PIECE = 4 * mmap.PAGESIZE
FCNTL = fcntl.fcntl


def no_direct_files(fd: int, command: int, argument: int = 0) -> int:
    """As where the file system has none."""
    if command == fcntl.F_SETFL and argument & direct_file._DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return FCNTL(fd, command, argument)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("is_direct", [True, False])
def test_what_was_written_is_in_the_file(
    seed: int, is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of any size, of which some fill several of the file's own."""
    if not is_direct:
        monkeypatch.setattr(direct_file.fcntl, "fcntl", no_direct_files)
    rng, path = random.Random(seed), tmp_path / "plan"
    given = [rng.randbytes(rng.choice((0, 1, 777, PIECE, 3 * PIECE + 5, rng.randint(0, 2 * PIECE)))) for _ in range(9)]
    with path.open("wb") as file:
        direct = DirectFile(file, PIECE)
        for data in given:
            direct.write(data)
        direct.close()
    assert path.read_bytes() == b"".join(given)


@pytest.mark.parametrize("taken", [1, 100, mmap.PAGESIZE])
def test_a_write_that_is_short_goes_on(taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it ends within a page, after which the file system takes no whole pages."""
    real = os.write

    def short(fd: int, data: memoryview) -> int:
        return real(fd, data[:taken])

    data = random.Random(7).randbytes(PIECE + 9)
    with (tmp_path / "plan").open("wb") as file, monkeypatch.context() as patched:
        patched.setattr(direct_file.os, "write", short)
        direct = DirectFile(file, PIECE)
        direct.write(data)
        direct.close()
    assert (tmp_path / "plan").read_bytes() == data


def failing(fd: int, data: memoryview) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("act", [lambda direct: direct.write(bytes(2 * PIECE)), lambda direct: direct.close()])
def test_a_disk_that_is_full_is_said(
    act: Callable[[DirectFile], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the write that comes after, or when the file is closed."""
    with (tmp_path / "plan").open("wb") as file, monkeypatch.context() as patched:
        direct = DirectFile(file, PIECE)
        patched.setattr(direct_file.os, "write", failing)
        direct.write(bytes(PIECE))
        with pytest.raises(OSError, match="No space left on device"):
            act(direct)
            direct.close()


def test_pieces_are_written_past_the_page_cache() -> None:
    """Where the file system of the temporary files can."""
    with tempfile.TemporaryFile() as file:
        direct = DirectFile(file, PIECE)
        asked = fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & direct_file._DIRECT
        if not asked:
            pytest.skip("this file system has no O_DIRECT")
        direct.write(bytes(PIECE + 1))
        direct.close()
        assert os.fstat(file.fileno()).st_size == PIECE + 1
