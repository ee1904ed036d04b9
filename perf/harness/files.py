"""Reports on disk: whole ones, and rows that one run after the other adds."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from kvforge.common.errors import KvforgeError

ROUNDED = 5e-6
"""How far a number of a report may be from what was measured, relatively."""
Row = dict[str, Any]
Item = TypeVar("Item")


def check_place(stem: Path) -> None:
    """Raise KvforgeError where no file with this beginning can be written."""
    if not stem.name or not stem.parent.is_dir() or not os.access(stem.parent, os.W_OK):
        raise KvforgeError(f"{stem} cannot be written; choose a name in a folder that is there and can be written to.")


def write_json(path: Path, report: Any) -> None:
    """Write ``report`` a line a value, as all results are, with no space behind a name and no more than six digits of a
    fraction: there are many.

    Raises:
        KvforgeError: it cannot be written there.
    """
    _write(path, json.dumps(in_six_digits(report), indent=0, separators=(",", ":")) + "\n")


def in_six_digits(value: Any) -> Any:
    """Return ``value``, and all in it, with numbers that have a fraction rounded to six digits, or to whole ones."""
    if isinstance(value, dict):
        return {key: in_six_digits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [in_six_digits(each) for each in value]
    if isinstance(value, float) and math.isfinite(value) and value:
        return round(value, max(0, 5 - math.floor(math.log10(abs(value)))))
    return value


def write_report(stem: Path, report: Any, markdown: str | None = None) -> None:
    """STEM.json, and STEM.md where there is a ``markdown`` form. Raises as ``write_json``."""
    write_json(stem.with_suffix(".json"), report)
    if markdown is not None:
        _write(stem.with_suffix(".md"), markdown)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvforgeError(f"{path} cannot be written ({error.strerror}); choose another place.") from None


def read_json(path: Path, default: Any) -> Any:
    """Return what the file holds, ``default`` where there is none."""
    return json.loads(path.read_text()) if path.is_file() else default


def merge_rows(old: Sequence[Row], new: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Return all rows; of two with the same ``keys`` the new one, where the old one stood."""
    return list({tuple(row[key] for key in keys): row for row in [*old, *new]}.values())


def append(file: Path, line: Row) -> None:
    """Add a line of JSON."""
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def read_lines(file: Path) -> list[Row]:
    """Return the lines so far; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def run_cells(
    cells: Sequence[Item], measure: Callable[[Item], Iterable[Row]], file: Path, minutes: float, unit: str
) -> None:
    """Measure the cells one after the other, none begun after ``minutes``; what is found of each becomes lines of
    ``file`` at once, so that a later run leaves it out."""
    deadline = time.monotonic() + 60 * minutes
    for cell in tqdm(cells, unit=unit, disable=None):
        if time.monotonic() > deadline:
            break
        for line in measure(cell):
            append(file, line)
