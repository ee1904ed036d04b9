"""One run at a time in a directory."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from kvforge.distill import world
from kvforge.errors import KvforgeError


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Within the block no other run can lock ``directory``, which is made where it is missing. The lock ends with the
    process, however that ends. All processes of a run call this together.

    Raises:
        KvforgeError: another run has it, or it cannot be made.
    """
    held = [-1]  # process 0 alone holds the lock

    def take() -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            held[0] = os.open(directory, os.O_RDONLY)
            fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KvforgeError(f"Another run works in {directory}; wait for it, or choose another --work.") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
                raise KvforgeError(
                    f"{directory} cannot be a run's directory ({error.strerror}); choose another --work."
                ) from None

    try:
        world.first_process(take)
        yield
    finally:
        if held[0] >= 0:
            os.close(held[0])
