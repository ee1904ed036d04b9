"""Writing a report where it was asked for."""

import json
import os
from pathlib import Path
from typing import Any

from kvforge.errors import KvforgeError


def check_place(stem: Path) -> None:
    """Raise KvforgeError where no file with this beginning can be written."""
    if not stem.name or not stem.parent.is_dir() or not os.access(stem.parent, os.W_OK):
        raise KvforgeError(f"{stem} cannot be written; choose a name in a folder that is there and can be written to.")


def write_report(stem: Path, report: dict[str, Any], markdown: str | None = None) -> None:
    """STEM.json, and STEM.md where there is a ``markdown`` form.

    Raises:
        KvforgeError: they cannot be written there.
    """
    try:
        stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        if markdown is not None:
            stem.with_suffix(".md").write_text(markdown)
    except OSError as error:
        raise KvforgeError(f"{stem} cannot be written ({error.strerror}); choose another place.") from None
