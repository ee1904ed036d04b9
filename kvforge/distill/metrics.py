"""The log of a run: one line of a CSV file per optimizer step."""

import csv
from pathlib import Path

from kvforge.errors import KvforgeError

METRICS_FILE = "metrics.csv"
COLUMNS = ("step", "tokens", "seconds", "lr", "loss", "kl", "hidden", "early_exit_kl", "grad_norm", "agreement")


def cut_after(path: Path, step: int) -> None:
    """Make the log end with ``step``: an interrupted run may have done more steps than its state knows of."""
    rows: list[str] = []
    if path.exists():
        rows = [row for row in path.read_text().splitlines()[1:] if row.count(",") == len(COLUMNS) - 1]
    rows = [row for row in rows if int(row.split(",", 1)[0]) <= step]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(f"{row}\n" for row in [",".join(COLUMNS), *rows]))
    unfinished.replace(path)


def append(path: Path, row: dict[str, float]) -> None:
    """Add one step; a value that is absent (no early-exit head) stays empty.

    Raises:
        KvforgeError: it cannot be written.
    """
    try:
        with path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(
                {name: value if isinstance(value, int) else f"{value:.6g}" for name, value in row.items()}
            )
    except OSError as error:
        raise KvforgeError(
            f"{path} cannot be written ({error.strerror}); the last saved state is kept: free space there and give "
            "the same command again."
        ) from error
