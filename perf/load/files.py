"""Writing a report where it was asked for."""

import json
from pathlib import Path
from typing import Any

from kvforge.errors import KvforgeError


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
