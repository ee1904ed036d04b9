"""Writing an engine directory so that it is either whole or not there."""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from kvforge.engine import MANIFEST_FILE
from kvforge.errors import BuildError


def check_output(output: Path, overwrite: bool) -> None:
    """Raise BuildError unless an engine may be written to ``output``."""
    if not output.exists():
        return
    if not (output / MANIFEST_FILE).is_file():
        raise BuildError(f"{output} exists and is not an engine; choose another output directory.")
    if not overwrite:
        raise BuildError(f"{output} exists; add --force to replace it, or choose another output directory.")


@contextlib.contextmanager
def staging_directory(output: Path) -> Iterator[Path]:
    """Yield an empty directory beside ``output`` that is renamed to it when the block succeeds.

    On any exception, SIGINT and SIGTERM included, it is removed and ``output`` is as before. A process killed
    outright leaves only the hidden staging directory; the next build to the same place removes it.
    """
    output = Path(os.path.realpath(output))  # a symbolic link stays one
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(output)
        staging = output.parent / f".{output.name}.building-{os.getpid()}"
        staging.mkdir()
    except FileExistsError:
        raise BuildError(f"{output} cannot be made: its parent is a file, or another build to it runs.") from None
    except OSError as error:
        raise BuildError(f"{output} cannot be made ({error.strerror}); choose another output directory.") from None
    replace = output.exists()
    try:
        with _terminate_as_exception():
            yield staging
            _publish(staging, output, replace)
    except OSError as error:
        raise BuildError(f"{output} was not built: {error}; free space or correct permissions there.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, output: Path, replace: bool) -> None:
    """Rename ``staging`` to ``output``; an engine is replaced only if it was there when the build began."""
    if not replace:
        if output.exists():
            raise BuildError(f"{output} was made by another build meanwhile; that engine is kept.")
        staging.rename(output)
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
