"""The pages of one engine in a folder that other servers and other engines may share."""

import contextlib
import json
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvforge.common.errors import EngineError
from kvforge.prefix_store.page_file import HEADER, DamagedPage, PageName, read_page, write_page

logger = logging.getLogger(__name__)
ABOUT_FILE = "about.json"
TEMPORARY = ".tmp"
STALE_S = 600.0
"""The age at which a temporary file's writer is taken for dead."""
TOUCH_S = 60.0
"""A page's time of last use is no more exact than this."""
RETRY_S = 10.0
"""How long nothing is written after an error."""
MARGIN = 16
"""This part of the limit is freed beyond what is needed, so that folders are not read for every page."""


class PageEntry(NamedTuple):
    """A file of a page: the last use comes from its modification time (seconds since 1970)."""

    path: Path
    name: PageName
    num_bytes: int
    last_used: float


class EngineFolder:
    """Pages by the digest of their prefix. Which there are is known without asking the disk.

    What cannot be written or read, is damaged or is gone counts as not there; the log says so once for each reason. Any
    thread may call any method. Files of an engine that ``key`` does not name are never read, but count in the limit
    and may be removed.

    Raises:
        EngineError: the folder cannot be made, or other users may write to it.
    """

    def __init__(self, root: Path, key: bytes, about: dict[str, Any], limit_bytes: int) -> None:
        self._root, self._key, self._limit = root, key, limit_bytes
        self.path = root / key.hex()
        for folder in (root, self.path):
            make_private(folder)
        if not (self.path / ABOUT_FILE).exists():
            with self._reported("written"):
                temporary = self._temporary()
                temporary.touch(0o600)
                temporary.write_text(json.dumps(about), encoding="utf-8")
                temporary.rename(self.path / ABOUT_FILE)
        self._priorities: dict[bytes, int] = {}
        self._touched: dict[bytes, float] = {}
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._no_writes_before = self._no_scan_before = 0.0
        self._num_bytes = self._num_new = 0
        self.refresh()
        self._measure()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._priorities

    def __len__(self) -> int:
        return len(self._priorities)

    def write(self, digest: bytes, priority: int, content: memoryview) -> bool:
        """Write a page unless it is there; False where it is not afterwards."""
        size = HEADER.size + len(content)
        if digest in self or time.monotonic() < self._no_writes_before:
            return digest in self
        if self._num_bytes + size > self._limit or self._num_new > self._limit // MARGIN:
            self.trim(size)
        if self._num_bytes + size > self._limit:
            return False
        temporary = self._temporary()
        with self._reported("written"):
            try:
                write_page(temporary, self._key, digest, content)
                temporary.rename(self.path / str(PageName(digest, priority)))
            finally:
                temporary.unlink(missing_ok=True)
            with self._lock:
                self._priorities[digest] = priority
                self._num_bytes += size
                self._num_new += size
            return True
        self._no_writes_before = time.monotonic() + RETRY_S
        return False

    def read(self, digest: bytes, content: memoryview) -> bool:
        """Fill ``content`` with a page, and note its use; False where that is not there or not sound."""
        priority = self._priorities.get(digest)
        if priority is None:
            return False
        path = self.path / str(PageName(digest, priority))
        with self._reported("read"):
            try:
                read_page(path, self._key, digest, content)
            except FileNotFoundError:  # another server removed it
                pass
            except DamagedPage as error:
                path.unlink(missing_ok=True)
                self._say("damaged", f"{path} is damaged ({error}); it was removed, and is computed again.")
            else:
                self.touch([digest])
                return True
        self._priorities.pop(digest, None)
        return False

    def touch(self, digests: Iterable[bytes]) -> None:
        """Note that pages are used now."""
        now = time.monotonic()
        for digest in digests:
            priority = self._priorities.get(digest)
            if priority is not None and self._touched.get(digest, -TOUCH_S) + TOUCH_S <= now:
                self._touched[digest] = now
                with contextlib.suppress(OSError):
                    os.utime(self.path / str(PageName(digest, priority)))

    def set_priority(self, digest: bytes, priority: int) -> None:
        """Change what a page is worth, where it is there."""
        old = self._priorities.get(digest)
        if old not in (None, priority):
            with contextlib.suppress(OSError):
                (self.path / str(PageName(digest, old))).rename(self.path / str(PageName(digest, priority)))
                self._priorities[digest] = priority

    def refresh(self) -> None:
        """Learn of the pages that other servers wrote and removed, unless that was done just now: in a large folder it
        is done seldom, for at most a 200th of the time."""
        start = time.monotonic()
        if start < self._no_scan_before:
            return
        with self._reported("read"):
            found = {name.digest: name.priority for name in map(PageName.parse, os.listdir(self.path)) if name}
            with self._lock:
                self._priorities = found
            self._touched = {digest: when for digest, when in self._touched.copy().items() if digest in found}
        self._no_scan_before = time.monotonic() + max(5.0, 200 * (time.monotonic() - start))

    def trim(self, num_bytes: int) -> None:
        """Make room for so many bytes and a margin: remove what is worth least, and of that what is used longest ago,
        whichever engine it is of."""
        entries = sorted(self._measure(), key=lambda entry: (entry.name.priority, entry.last_used))
        if self._num_bytes + num_bytes <= self._limit:
            return
        wanted = self._limit - num_bytes - self._limit // MARGIN
        for entry in entries:
            if self._num_bytes <= max(wanted, 0):
                return
            with contextlib.suppress(OSError):
                entry.path.unlink()
                self._num_bytes -= entry.num_bytes
                if entry.path.parent == self.path:
                    self._priorities.pop(entry.name.digest, None)

    def _measure(self) -> list[PageEntry]:
        """Count the bytes of all engines' pages, and remove what dead writers left."""
        entries: list[PageEntry] = []
        with self._reported("read"):
            entries = list(page_entries(self._root))
            for path in self._root.glob(f"*/*{TEMPORARY}"):
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime < time.time() - STALE_S:
                        path.unlink()
        self._num_bytes, self._num_new = sum(entry.num_bytes for entry in entries), 0
        return entries

    def _temporary(self) -> Path:
        return self.path / f"{secrets.token_hex(8)}{TEMPORARY}"

    @contextlib.contextmanager
    def _reported(self, done: str) -> Iterator[None]:
        """Say once that something could not be done, and go on."""
        try:
            yield
        except OSError as error:
            self._say(done, f"pages in {self.path} cannot be {done} ({error.strerror}); they are computed instead.")

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s This is said once.", text)


def page_entries(root: Path) -> Iterator[PageEntry]:
    """Yield the pages of all engines below ``root``. Raises OSError where that cannot be read."""
    with os.scandir(root) as engines:
        folders = [engine.path for engine in engines if engine.is_dir(follow_symlinks=False)]
    for folder in folders:
        with os.scandir(folder) as files:
            for file in files:
                name = PageName.parse(file.name)
                if name is not None:
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat(follow_symlinks=False)
                        yield PageEntry(Path(file.path), name, status.st_size, status.st_mtime)


def make_private(folder: Path) -> None:
    """Make a folder that its owner alone can read, where there is none. Raises EngineError unless it then is this
    user's and nobody else may write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise EngineError(f"--prefix-dir {folder} cannot be used ({error.strerror}); choose another folder.") from None
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise EngineError(
            f"--prefix-dir {folder} is another user's, or others may write to it: they could change what this server "
            "answers. Give a folder that is new or that only you may write to (chmod 700)."
        )
