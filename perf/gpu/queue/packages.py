"""Compiled graphs from one run of the queue to the next: a machine that is lent forgets them."""

import zipfile
from pathlib import Path

from kvforge.common.errors import KvforgeError
from perf.gpu.models import COMPLETE
from perf.gpu.queue.results import appearing_whole

PACKAGES = "packages.zip"
MOST_BYTES = 15 << 20
"""A larger file does not come back."""


def keep_packages(path: Path, root: Path) -> list[str]:
    """Write the folders of compiled graphs below ``root`` (``kvforge-NAME/cuda/...``) to a zip file, never seen in
    part; returns those that ``MOST_BYTES`` had no room for."""
    folders = sorted(mark.parent for mark in root.glob(f"kvforge-*/cuda/**/{COMPLETE}"))
    left_out, room = [], MOST_BYTES
    with (
        appearing_whole(path) as hidden,
        zipfile.ZipFile(hidden, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as kept,
    ):
        for folder in folders:
            files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
            size = sum(file.stat().st_size for file in files)
            if size > room:
                left_out.append(str(folder.relative_to(root)))
                continue
            room -= size
            for file in files:
                kept.write(file, file.relative_to(root))
    return left_out


def restore_packages(path: Path, root: Path) -> None:
    """Unpack what ``keep_packages`` wrote. Graphs that were compiled from other sources are compiled again.

    Raises:
        KvforgeError: it is no such file.
    """
    try:
        with zipfile.ZipFile(path) as kept:
            if odd := [name for name in kept.namelist() if not name.startswith("kvforge-") or ".." in name]:
                raise KvforgeError(f"{path} has {odd[0]}, which is no package; give the {PACKAGES} of a queue's --out.")
            marks = [name for name in kept.namelist() if name.endswith(f"/{COMPLETE}")]
            kept.extractall(root, [name for name in kept.namelist() if name not in marks])
            kept.extractall(root, marks)  # last: graphs without a mark are compiled again
    except (OSError, zipfile.BadZipFile) as error:
        raise KvforgeError(f"{path} cannot be read ({error}); give the {PACKAGES} of a queue's --out.") from None
