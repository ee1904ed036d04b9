"""Files beside the weights of a checkpoint that is one file."""

import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path


class SideFolder:
    """A temporary folder with the tokenizer and the other files that a checkpoint's directory would have.

    It is written when ``path`` is first asked for, and removed with the last reference to it or at the end of the
    process.
    """

    def __init__(self, write: Callable[[Path], None]) -> None:
        self._write = write

    @cached_property
    def path(self) -> Path:
        """The folder; what writing it raises is raised here."""
        folder = Path(tempfile.mkdtemp(prefix="kvforge-gguf-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._write(folder)
        return folder
