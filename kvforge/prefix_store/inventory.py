"""What is in a folder of prefixes, for people: listed, removed, packed and unpacked."""

import contextlib
import json
import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.prefix_store.folder import ABOUT_FILE, make_private, page_entries
from kvforge.prefix_store.page_file import HEADER, DamagedPage, PageName, read_page

_ABOUT = {"model": str, "kv_dtype": str, "kv_policy": str, "page_size": int, "page_bytes": int}
"""What is believed of an engine: an archive may say anything."""


@dataclass
class StoredEngine:
    """The pages of one engine; ``last_used`` in seconds since 1970."""

    key: str
    about: dict[str, Any]
    num_pages: int = 0
    num_bytes: int = 0
    last_used: float = 0.0
    paths: list[Path] = field(default_factory=list, repr=False)


def list_prefixes(root: Path) -> list[StoredEngine]:
    """Return the engines that have pages below ``root``, the last used first. Raises KvforgeError where it cannot be
    read."""
    engines: dict[Path, StoredEngine] = {}
    try:
        for entry in page_entries(root):
            folder = entry.path.parent
            engine = engines.setdefault(folder, StoredEngine(folder.name, _about(folder)))
            engine.num_pages += 1
            engine.num_bytes += entry.num_bytes
            engine.last_used = max(engine.last_used, entry.last_used)
            engine.paths.append(entry.path)
    except OSError as error:
        raise KvforgeError(f"{root} cannot be read ({error.strerror}); give the folder of --prefix-dir.") from None
    return sorted(engines.values(), key=lambda engine: -engine.last_used)


def save_prefixes(root: Path, archive: Path) -> int:
    """Write all pages to a new tar archive that this user alone may read; returns how many. Raises KvforgeError."""
    paths = [path for engine in list_prefixes(root) for path in engine.paths]
    try:
        own = os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(own, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            for path in [*{path.parent / ABOUT_FILE for path in paths}, *paths]:
                with contextlib.suppress(FileNotFoundError):  # a server removed it meanwhile
                    tar.add(path, str(path.relative_to(root)), recursive=False)
    except OSError as error:
        raise KvforgeError(f"{archive} cannot be written ({error.strerror}); choose another file.") from None
    return len(paths)


def load_prefixes(root: Path, archive: Path) -> tuple[int, int]:
    """Add the pages of an archive to a folder; returns how many, and how many were damaged or no pages and left out.
    Raises KvforgeError."""
    num_loaded = num_refused = 0
    make_private(root)
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                key, _, name = member.name.partition("/")
                page, content = PageName.parse(name), tar.extractfile(member) if member.isfile() else None
                is_key = len(key) == 32 and not key.strip("0123456789abcdef")
                if content is None or not is_key or (page is None and name != ABOUT_FILE):
                    num_refused += 1
                elif _place(root / key, name, page, content.read()):
                    num_loaded += page is not None
                else:
                    num_refused += 1
    except (OSError, tarfile.TarError) as error:
        raise KvforgeError(f"{archive} cannot be loaded ({error}); give what kvforge cache save wrote.") from None
    return num_loaded, num_refused


def _place(folder: Path, name: str, page: PageName | None, data: bytes) -> bool:
    make_private(folder)
    temporary = folder / f"load-{os.getpid()}.tmp"
    try:
        temporary.touch(0o600)
        temporary.write_bytes(data)
        if page is not None:
            content = memoryview(bytearray(max(len(data) - HEADER.size, 0)))
            read_page(temporary, bytes.fromhex(folder.name), page.digest, content)
        temporary.rename(folder / name)
    except DamagedPage:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    given = about.items() if isinstance(about, dict) else ()
    return {name: value for name, value in given if type(value) is _ABOUT.get(name) and str(value).isprintable()}
