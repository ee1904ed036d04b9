"""Object files that earlier compilations left, so that a library is compiled from what changed since.

An object's name is a digest of all that decides its contents: the compiler, torch, the flags, and the text of its
source and of every file of ours that this one includes.
"""

import hashlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_KEPT_S = 30 * 24 * 3600  # since its last use


def included(source: Path, folders: Sequence[Path]) -> list[Path]:
    """Return the files below ``folders`` that ``source`` includes, also by way of others, sorted; all names in
    ``#include`` begin at one of the folders."""
    found: set[Path] = set()
    unread = [source]
    while unread:
        for name in _INCLUDE.findall(unread.pop().read_text()):
            file = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if file is not None and file not in found:
                found.add(file)
                unread.append(file)
    return sorted(found)


def object_path(cache: Path, source: Path, folders: Sequence[Path], flags: Sequence[str], compiler: str) -> Path:
    """Return where the object of ``source`` belongs in ``cache``, compiled with ``flags`` by the compiler that says
    ``compiler`` of itself."""
    digest = hashlib.sha256("\0".join((compiler, torch.__version__, *flags)).encode())
    for file in (source, *included(source, folders)):
        digest.update(b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return cache / "objects" / f"{digest.hexdigest()[:32]}.o"


def forget_old(cache: Path) -> None:
    """Delete objects that nothing was made of for a month, and halves that killed builds left."""
    oldest = time.time() - _KEPT_S
    for path in (cache / "objects").glob("*.o*"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:  # by another process
            continue


def mark_used(path: Path) -> bool:
    """Whether there is such an object, which then counts as used now."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True
