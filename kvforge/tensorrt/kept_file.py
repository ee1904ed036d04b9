"""Files that a later process takes up, where they are whole."""

import os
import tempfile
from pathlib import Path


def write_kept(file: Path, data: bytes) -> None:
    """Put ``data`` into a file, which others see as it was or whole; raises OSError where it cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as temporary:
        try:
            temporary.write(data)
            temporary.flush()
            os.replace(temporary.name, file)
        except BaseException:
            os.unlink(temporary.name)
            raise
