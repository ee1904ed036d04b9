"""JSON files of a checkpoint that are objects."""

import json
from pathlib import Path
from typing import Any

from kvforge.common.errors import CheckpointError, first_line

MAX_JSON_BYTES = 1 << 26
"""Ten times the index of the largest models."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises CheckpointError where there is none, or more than MAX_JSON_BYTES."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_JSON_BYTES} bytes; it is not what its name says.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {first_line(error)}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object.")
    return content
