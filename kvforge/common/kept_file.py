"""Files that a later process takes up, where they are whole."""

import threading
from pathlib import Path


def write_kept(file: Path, data: bytes) -> None:
    """Put ``data`` into a file, which others see as it was or whole; raises OSError where it cannot be written.

    A process that is killed leaves a half beside it, whose name ends with the number of its thread.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(f"{file.name}.{threading.get_native_id()}")
    try:
        half.write_bytes(data)
        half.replace(file)
    finally:
        half.unlink(missing_ok=True)
