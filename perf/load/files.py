"""Writing a report where it was asked for."""

import json
from pathlib import Path
from typing import Any


def write_report(stem: Path, report: dict[str, Any], markdown: str | None = None) -> None:
    """STEM.json, and STEM.md where there is a ``markdown`` form."""
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    if markdown is not None:
        stem.with_suffix(".md").write_text(markdown)
