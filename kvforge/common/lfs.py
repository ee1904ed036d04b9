"""Git LFS pointers: the small texts that stand for large files where a clone did not fetch them."""

from pathlib import Path

_BEGIN = b"version https://git-lfs.github.com/spec/"


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file is a pointer and not the file that its name promises."""
    try:
        with path.open("rb") as file:
            return file.read(len(_BEGIN)) == _BEGIN
    except OSError:
        return False


def fetch_it(path: Path) -> str:
    """Return the sentence for a pointer."""
    return f"{path} is a Git LFS pointer and not the file itself; run git lfs pull in its clone, or download it again."
