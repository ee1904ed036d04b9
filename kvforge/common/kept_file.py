"""Files that a later process takes up, where they are whole."""

import secrets
from pathlib import Path


def write_kept(file: Path, data: bytes) -> None:
    """Put ``data`` into a file, which others see as it was or whole; raises OSError where it cannot be written.

    A process that is killed leaves a half beside it, whose name ends with a number that no other writer has: machines
    that share a folder have processes and threads with the same ones.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(f"{file.name}.{secrets.randbits(64)}")
    try:
        half.write_bytes(data)
        half.replace(file)
    finally:
        half.unlink(missing_ok=True)
