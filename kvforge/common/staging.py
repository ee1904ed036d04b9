"""Output directories that are either whole or not there."""

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from kvforge.common.errors import KvforgeError


def check_free(output: Path) -> None:
    """Raise KvforgeError where something is at ``output`` already; an empty directory is nothing."""
    try:
        taken = os.path.lexists(os.path.realpath(output)) and not (output.is_dir() and not any(output.iterdir()))
    except OSError as error:
        raise KvforgeError(f"{output} cannot be read ({error.strerror}); choose another output directory.") from None
    if taken:
        raise KvforgeError(f"{output} is there and not empty; choose another output directory or remove it.")


def check_removable(output: Path) -> None:
    """Raise KvforgeError where what is in the directory ``output`` may not be removed, so that nothing can take its
    place."""
    if output.is_dir() and not os.access(output, os.W_OK | os.X_OK):
        raise KvforgeError(f"{output} is read-only; make it writable, or choose another output directory.")


@contextlib.contextmanager
def staging_directory(output: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty directory beside ``output`` that is renamed to it when the block succeeds.

    It is locked: one run at a time writes to an output, and the next is refused before it works for minutes.
    ``replace`` lets it take the place of what is at ``output`` when the block begins; what comes there meanwhile is
    kept in any case. On any exception, SIGINT and SIGTERM included, it is removed and ``output`` is as before. A
    process killed outright leaves only hidden directories; the next run to the same place removes them, and puts back
    what a replacement had taken away.

    Raises:
        KvforgeError: ``output`` exists and may not be replaced, another run writes to it, or it cannot be written.
    """
    if not replace:
        check_free(output)
    output = Path(os.path.realpath(output))  # a symbolic link stays one
    try:
        str(output).encode()
    except UnicodeEncodeError:  # which the libraries that write models cannot open
        raise KvforgeError(f"the path {str(output)!r} is not UTF-8 text; choose another output directory.") from None
    staging = output.parent / f".{output.name}.building"
    old = output.parent / f".{output.name}.replaced"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(staging)
    except FileExistsError:
        raise KvforgeError(f"{output} cannot be made: its parent is a file; choose another output directory.") from None
    except OSError as error:
        raise KvforgeError(f"{output} cannot be made ({error.strerror}); choose another output directory.") from None
    try:
        _empty(staging)
        _recover(output, old)
        if not replace:
            check_free(output)
        else:
            check_removable(output)
        replaced = _identity(output) if replace else None
        with _terminate_as_exception():
            yield staging
            _publish(staging, output, old, replaced)
    except OSError as error:
        where = _elsewhere(error, staging) or "there"
        raise KvforgeError(f"{output} was not written: {error}; free space or correct permissions {where}.") from error
    finally:
        if _identity(staging) == _identity(lock):
            shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def _elsewhere(error: OSError, staging: Path) -> str:
    """Return ``"at FILE"`` where the error is about a file that is not the output's."""
    file = error.filename
    if not isinstance(file, (str, bytes)) or Path(os.fsdecode(file)).absolute().is_relative_to(staging.parent):
        return ""
    return f"at {os.fsdecode(file)}, which is no part of it"


def _lock(staging: Path) -> int:
    """Make ``staging``, or take the one that a killed run left, and return the descriptor that locks it.

    Raises:
        KvforgeError: another run has it.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            staging.mkdir()
        try:
            lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # its run has ended since
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise KvforgeError(
                f"Another run writes to {staging.parent / staging.name[1:].removesuffix('.building')} "
                f"({error.strerror}); wait for it, or choose another output directory."
            ) from None
        if _identity(staging) == _identity(lock):
            return lock
        os.close(lock)  # of a directory that has become an output


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _identity(place: Path | int) -> tuple[int, int] | None:
    """Return what tells a directory from any other that takes its name; None where there is none."""
    try:
        found = os.stat(place)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _recover(output: Path, old: Path) -> None:
    """Put back what a run killed between its two last steps had taken from ``output``; only the lock's holder may."""
    if old.exists() and not output.exists():
        old.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def _publish(staging: Path, output: Path, old: Path, replaced: tuple[int, int] | None) -> None:
    """Rename ``staging`` to ``output``, of which only the directory ``replaced`` may be taken away."""
    try:
        if replaced is not None and output.exists():
            output.rename(old)
            if _identity(old) != replaced:
                old.rename(output)
                raise _kept(output)
        try:
            staging.rename(output)  # which takes the place of an empty directory, and of nothing else
        except OSError:
            if not output.exists():
                raise
            raise _kept(output) from None
    except BaseException:
        _recover(output, old)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _kept(output: Path) -> KvforgeError:
    return KvforgeError(f"{output} was made by another run meanwhile; that one is kept.")


@contextlib.contextmanager
def _terminate_as_exception() -> Iterator[None]:
    """Within the block SIGTERM raises SystemExit (in the main thread), so that clean-up code runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
