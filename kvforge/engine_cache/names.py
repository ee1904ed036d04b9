"""What is to be served: an engine, or a checkpoint to build one from."""

import re
from pathlib import Path

from kvforge.common.checkpoint_files import CONFIG, is_gguf
from kvforge.common.errors import EngineError
from kvforge.hub import parse_name
from kvforge.manifest import MANIFEST_FILE


def names_checkpoint(name: str | Path, revision: str | None = None) -> bool:
    """Whether ``name`` is a checkpoint, on the Hub, a directory or a GGUF file, and not an engine. Raises
    CheckpointError where ``revision`` does not go with it."""
    path = Path(name)
    return (
        parse_name(name, revision) is not None
        or (path.exists() and is_gguf(path))
        or ((path / CONFIG).is_file() and not (path / MANIFEST_FILE).is_file())
    )


def check_is_there(name: str | Path) -> None:
    """Raise EngineError where a ``name`` that is none of the Hub is no path either."""
    if not Path(name).exists():
        if re.fullmatch(r"[\w.-]+:\d+(/.*)?", str(name)):
            raise EngineError(f"{name} is no engine; the URL of a server begins with http://: give http://{name}.")
        raise EngineError(
            f"{name} is not an engine directory (there is nothing of this name); give an engine, a checkpoint, or "
            "OWNER/NAME of a checkpoint on the Hub."
        )
