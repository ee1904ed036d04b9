"""The log of a run: one line of a CSV file per optimizer step."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from kvforge.common.errors import KvforgeError

METRICS_FILE = "metrics.csv"
COLUMNS = ("step", "tokens", "seconds", "lr", "loss", "kl", "hidden", "early_exit_kl", "grad_norm", "agreement")


def cut_after(path: Path, step: int, columns: Sequence[str] = COLUMNS) -> None:
    """Make the log end with ``step``: an interrupted run may have done more steps than its state knows of. The first of
    ``columns`` is the step.

    Raises:
        KvforgeError: the file is something else, or cannot be written.
    """
    header, whole = ",".join(columns), re.compile(rf"\d+(,[^,]*){{{len(columns) - 1}}}", re.ASCII)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        if lines and lines[0] != header:
            raise KvforgeError(f"{path} is not the log of a distillation; choose another --work or remove it.")
        rows = [row for row in lines[1:] if whole.fullmatch(row) and int(row.split(",", 1)[0]) <= step]
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(f"{row}\n" for row in [header, *rows]), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise KvforgeError(
            f"{path} cannot be written ({error.strerror}); choose another --work, or free space there."
        ) from error


def append(path: Path, row: dict[str, float], columns: Sequence[str] = COLUMNS) -> None:
    """Add one step; a value that is absent (no early-exit head) stays empty.

    Raises:
        KvforgeError: it cannot be written.
    """
    try:
        with path.open("a", newline="") as file:
            csv.DictWriter(file, columns, lineterminator="\n").writerow(
                {name: value if isinstance(value, int) else f"{value:.6g}" for name, value in row.items()}
            )
    except OSError as error:
        raise KvforgeError(
            f"{path} cannot be written ({error.strerror}); the last saved state is kept: free space there and give "
            "the same command again."
        ) from error
