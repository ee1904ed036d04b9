"""Git LFS pointers: the small texts that stand for large files where a clone did not fetch them."""

from pathlib import Path

from kvforge.common.checkpoint_files import begins_with

_BEGIN = b"version https://git-lfs.github.com/spec/"


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file is a pointer and not the file that its name promises."""
    return begins_with(path, _BEGIN)


def fetch_it(path: Path) -> str:
    """Return the sentence for a pointer."""
    return f"{path} is a Git LFS pointer and not the file itself; run git lfs pull in its clone, or download it again."
