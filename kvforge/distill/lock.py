"""One run at a time in a directory."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from kvforge.common.errors import KvforgeError
from kvforge.distill import world


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Within the block no other run can lock ``directory``, which is made where it is missing. The lock ends with the
    process, however that ends; where the file system cannot lock, there is none. All processes of a run call this
    together.

    Raises:
        KvforgeError: another run has it, or it cannot be made.
    """
    held = [-1]  # the directory's descriptor, in process 0

    def take() -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            held[0] = os.open(directory, os.O_RDONLY)
        except OSError as error:
            raise KvforgeError(
                f"{directory} cannot be a run's directory ({error.strerror}); choose another --work."
            ) from None
        try:
            fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KvforgeError(f"Another run works in {directory}; wait for it, or choose another --work.") from None
        except OSError:
            pass  # some network file systems cannot lock a directory

    try:
        world.first_process(take)
        yield
    finally:
        if held[0] >= 0:
            os.close(held[0])
