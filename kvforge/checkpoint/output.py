"""Where a checkpoint may be written."""

from collections.abc import Collection
from pathlib import Path

from kvforge.common.checkpoint_files import CONFIG
from kvforge.common.errors import KvforgeError
from kvforge.common.staging import check_free


def check_output(output: Path, sources: Collection[Path], overwrite: bool) -> None:
    """Raise KvforgeError unless a checkpoint made of those at ``sources`` may be written to ``output``.

    It may where nothing is, and with ``overwrite`` where a checkpoint is that is and holds none of ``sources``. What is
    no checkpoint is never replaced.
    """
    if not _is_checkpoint(output):
        check_free(output)
        return
    place = output.resolve()
    for source in sources:
        if place in (source.resolve(), *source.resolve().parents):
            raise KvforgeError(f"{output} is or holds {source}, which is read; choose another output directory.")
    if not overwrite:
        raise KvforgeError(
            f"{output} is there and not empty; add --force to replace it, or choose another output directory."
        )


def _is_checkpoint(directory: Path) -> bool:
    try:
        return (directory / CONFIG).is_file() and any(directory.glob("*.safetensors"))
    except OSError:
        return False
