"""Opening a checkpoint, whichever format it is in."""

from pathlib import Path

from kvforge.checkpoint.gguf import open_gguf
from kvforge.checkpoint.reader import Checkpoint, open_directory
from kvforge.common.checkpoint_files import is_gguf


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face-format directory, or a GGUF file. Raises CheckpointError as ``open_directory`` and
    ``open_gguf`` do."""
    return open_gguf(Path(path)) if is_gguf(Path(path)) else open_directory(Path(path))
