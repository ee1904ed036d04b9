"""Where an engine may be written."""

from pathlib import Path

from kvforge.common.errors import BuildError
from kvforge.manifest.files import MANIFEST_FILE


def check_output(output: Path, overwrite: bool) -> None:
    """Raise BuildError unless an engine may be written to ``output``."""
    if not output.exists():
        return
    if not (output / MANIFEST_FILE).is_file():
        raise BuildError(f"{output} exists and is not an engine; choose another output directory.")
    if not overwrite:
        raise BuildError(f"{output} exists; add --force to replace it, or choose another output directory.")
