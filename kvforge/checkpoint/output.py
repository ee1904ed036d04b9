"""Where a checkpoint may be written."""

import os
from collections.abc import Collection
from pathlib import Path

from kvforge.common.checkpoint_files import CONFIG
from kvforge.common.errors import KvforgeError
from kvforge.common.staging import check_free, check_removable


def check_output(output: Path, sources: Collection[Path | None], overwrite: bool) -> None:
    """Raise KvforgeError unless a checkpoint may be written to ``output`` that is made of ``sources``: checkpoints and
    files of text, of which those that are None or not there do not count.

    It may where nothing is, and with ``overwrite`` where a checkpoint is that is and holds none of ``sources``. What is
    no checkpoint is never replaced.
    """
    if not _is_checkpoint(output):
        check_free(output)
        return
    place = output.resolve()
    for source in sources:
        if source is not None and os.path.exists(source) and place in (source.resolve(), *source.resolve().parents):
            raise KvforgeError(f"{output} is or holds {source}, which is read; choose another output directory.")
    if not overwrite:
        raise KvforgeError(
            f"{output} is there and not empty; add --force to replace it, or choose another output directory."
        )
    check_removable(output)


def work_folder(work: str | Path | None, output: Path, sources: Collection[Path]) -> Path:
    """Return where a run's state lies: in ``work``, by default ``output`` and ``.training``. Raises KvforgeError where
    that is in ``output``, which appears at the run's end, or one of the checkpoints that it reads."""
    work = Path(f"{os.path.abspath(output)}.training" if work is None else work)
    place = work.resolve()
    if output.resolve() in (place, *place.parents):
        raise KvforgeError(f"--work {work} is in {output}; choose another directory for the run's state.")
    for source in sources:
        if place == source.resolve():
            raise KvforgeError(f"--work {work} is {source}; choose another directory for the run's state.")
    return work


def _is_checkpoint(directory: Path) -> bool:
    try:
        return (directory / CONFIG).is_file() and any(directory.glob("*.safetensors"))
    except OSError:
        return False
