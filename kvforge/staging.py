"""Output directories that are either whole or not there."""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from kvforge.errors import KvforgeError


def check_free(output: Path) -> None:
    """Raise KvforgeError where something is at ``output`` already; an empty directory is nothing."""
    try:
        taken = os.path.lexists(os.path.realpath(output)) and not (output.is_dir() and not any(output.iterdir()))
    except OSError as error:
        raise KvforgeError(f"{output} cannot be read ({error.strerror}); choose another output directory.") from None
    if taken:
        raise KvforgeError(f"{output} is there and not empty; choose another output directory or remove it.")


@contextlib.contextmanager
def staging_directory(output: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty directory beside ``output`` that is renamed to it when the block succeeds.

    ``replace`` lets it take the place of what is at ``output`` when the block begins; what another run writes there
    meanwhile is kept in any case. On any exception, SIGINT and SIGTERM included, it is removed and ``output`` is as
    before. A process killed outright leaves only the hidden staging directory; the next run to the same place removes
    it.

    Raises:
        KvforgeError: ``output`` exists and may not be replaced, or it cannot be written.
    """
    if not replace:
        check_free(output)
    output = Path(os.path.realpath(output))  # a symbolic link stays one
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(output)
        staging = output.parent / f".{output.name}.building-{os.getpid()}"
        staging.mkdir()
    except FileExistsError:
        raise KvforgeError(f"{output} cannot be made: its parent is a file, or another run writes to it.") from None
    except OSError as error:
        raise KvforgeError(f"{output} cannot be made ({error.strerror}); choose another output directory.") from None
    replace = replace and output.exists()
    try:
        with _terminate_as_exception():
            yield staging
            _publish(staging, output, replace)
    except OSError as error:
        raise KvforgeError(f"{output} was not written: {error}; free space or correct permissions there.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, output: Path, replace: bool) -> None:
    """Rename ``staging`` to ``output``; ``replace`` takes what is there away, otherwise that is kept."""
    if not replace:
        try:
            staging.rename(output)  # which takes the place of an empty directory, and of nothing else
        except OSError:
            if not output.exists():
                raise
            raise KvforgeError(f"{output} was made by another run meanwhile; that one is kept.") from None
        return
    old = staging.with_name(f"{staging.name}.old")
    try:
        output.rename(old)
        staging.rename(output)
    except BaseException:
        if old.exists() and not output.exists():
            old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(output: Path) -> None:
    prefix = f".{output.name}.building-"
    for leftover in output.parent.iterdir():
        pid = leftover.name.removeprefix(prefix).removesuffix(".old")
        if leftover.name.startswith(prefix) and pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
