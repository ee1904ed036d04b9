"""Folders as compressed archives in pieces that are small enough to be brought to a machine one after the other.

A piece is a folder with parts of archives, ``NAME.tar.xz.K``, and the index of all of them. ``add_piece`` collects
parts, in any order, and unpacks each archive when it is whole.
"""

import hashlib
import json
import lzma
import shutil
import tarfile
from pathlib import Path

from kvforge.common.errors import KvforgeError

INDEX = "pieces.json"


def pack(folder: Path, archive: Path) -> None:
    """Write a folder's files to ``archive`` (``.tar.xz``), as small as they get."""
    with (
        lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        tar.add(folder, ".")


def split(archives: dict[str, Path], out: Path, piece_bytes: int) -> list[Path]:
    """Write archives, by name, to ``out/piece-1`` and so on, each of at most ``piece_bytes`` without its index; returns
    these folders."""
    index, pieces, room = {}, [], 0
    for name, archive in archives.items():
        content, count = archive.read_bytes(), 0
        start = 0
        while start < len(content):
            if room == 0:
                pieces.append(out / f"piece-{len(pieces) + 1}")
                pieces[-1].mkdir(parents=True)
                room = piece_bytes
            size = min(room, len(content) - start)
            (pieces[-1] / f"{name}.tar.xz.{count}").write_bytes(content[start : start + size])
            start, count, room = start + size, count + 1, room - size
        index[name] = {"parts": count, "sha256": hashlib.sha256(content).hexdigest()}
    for piece in pieces:
        (piece / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return pieces


def is_carried(carried: Path | None, name: str) -> bool:
    """Whether an archive was unpacked below ``carried``."""
    return carried is not None and (carried / name).is_dir()


def add_piece(piece: Path, carried: Path) -> list[str]:
    """Add a piece's parts to those that are there, and unpack the archives that are whole, each to ``carried/NAME``;
    returns their names.

    Raises:
        KvforgeError: the folder is no piece, or an archive is not what was packed.
    """
    try:
        index = json.loads((piece / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise KvforgeError(f"{piece} is no piece ({error}); give a folder that --prepare wrote.") from None
    parts = carried / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    for part in piece.glob("*.tar.xz.*"):
        shutil.copyfile(part, parts / part.name)
    whole = []
    for name, told in index.items():
        files = [parts / f"{name}.tar.xz.{count}" for count in range(told["parts"])]
        if is_carried(carried, name) or not all(file.is_file() for file in files):
            continue
        _unpack(files, told["sha256"], carried / name)
        for file in files:
            file.unlink()
        whole.append(name)
    return whole


def _unpack(files: list[Path], sha256: str, folder: Path) -> None:
    joined = folder.with_name(f".{folder.name}.tar.xz")
    digest = hashlib.sha256()
    with joined.open("wb") as archive:
        for file in files:
            content = file.read_bytes()
            digest.update(content)
            archive.write(content)
    if digest.hexdigest() != sha256:
        joined.unlink()
        raise KvforgeError(f"{folder.name} was damaged on the way; bring all of its pieces again.")
    hidden = folder.with_name(f".{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    with lzma.open(joined) as packed, tarfile.open(fileobj=packed) as tar:
        tar.extractall(hidden)  # our own archive, whose hash was compared
    hidden.replace(folder)
    joined.unlink()
