"""A file of one page: a header, then K and V of all owners as they are in memory."""

import os
import re
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

FORMAT = b"KVFPAGE1"
HEADER = struct.Struct("<8s16s16sQI4x")
"""The format, the key of the engine, the digest of the prefix, the bytes that follow, and their CRC-32."""
_NAME = re.compile(r"([0-9a-f]{32})-(\d{3})\.page")


class DamagedPage(Exception):
    """The file is no whole page of this engine and prefix."""


class PageName(NamedTuple):
    """The prefix that ends with the page, and what the page is worth, 0 to 100: both are in the file's name."""

    digest: bytes
    priority: int

    def __str__(self) -> str:
        return f"{self.digest.hex()}-{self.priority:03d}.page"

    @classmethod
    def parse(cls, name: str) -> "PageName | None":
        """Return what a file's name says; None where it is not that of a page."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(bytes.fromhex(found[1]), int(found[2]))


def write_page(path: Path, engine: bytes, digest: bytes, content: memoryview) -> None:
    """Write a new file, readable for its owner alone. Raises OSError; what there is of the file then is the caller's to
    remove."""
    rest = [memoryview(HEADER.pack(FORMAT, engine, digest, len(content), zlib.crc32(content))), content]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while rest:
            written = os.writev(file, rest)
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if written:
                rest[0] = rest[0][written:]
    finally:
        os.close(file)


def read_page(path: Path, engine: bytes, digest: bytes, content: memoryview) -> None:
    """Fill ``content`` with that of a file. Raises DamagedPage where it is not this page, whole and as it was written,
    and OSError where it cannot be read."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block
    try:
        if os.fstat(file).st_size != HEADER.size + len(content):
            raise DamagedPage("its size is another")
        header, num_read = bytearray(HEADER.size), 0
        while num_read < HEADER.size + len(content):
            start = max(num_read - HEADER.size, 0)
            into = [content[start:]] if num_read >= HEADER.size else [memoryview(header)[num_read:], content]
            count = os.readv(file, into)
            if count == 0:
                raise DamagedPage("it ends too early")
            num_read += count
    finally:
        os.close(file)
    if bytes(header) != HEADER.pack(FORMAT, engine, digest, len(content), zlib.crc32(content)):
        raise DamagedPage("its checksum, its engine or its prefix is another")
