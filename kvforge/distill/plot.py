"""The log of a distillation as a figure."""

import csv
import math
from pathlib import Path

from kvforge.common.errors import KvforgeError
from kvforge.common.figures import new_figure, save_figure

PANELS = (
    ("loss", "log", {"loss": "loss", "kl": "KL", "early_exit_kl": "KL of the early-exit head"}),
    ("hidden-state error", "log", {"hidden": "before the last layer"}),
    ("agreement with the teacher", "linear", {"agreement": "most probable token"}),
    ("learning rate", "linear", {"lr": "learning rate"}),
)
"""Title, scale and columns (with their labels) of each panel."""


def plot_metrics(csv_path: Path, out_path: Path) -> None:
    """Plot loss, KL, hidden-state error, agreement and learning rate against the step, with tokens on a second axis.

    Values are drawn as the log has them, and their mean over a fiftieth of the run as a line. Columns that are absent
    or empty are left out, and a line of the log that is not complete ends it.

    Raises:
        KvforgeError: the log cannot be read or has no steps; matplotlib is missing; ``out_path`` cannot be written.
    """
    columns = _read(csv_path)
    figure = new_figure(10, 6.5)
    steps, tokens = columns["step"], columns.get("tokens")
    for axes, (title, scale, series) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        drawn = [name for name in series if any(math.isfinite(value) for value in columns.get(name, []))]
        for name in drawn:
            (points,) = axes.plot(steps, columns[name], alpha=0.35, linewidth=0.8)
            smooth = columns[name] if name == "lr" else _smooth(columns[name], len(steps) // 100)
            axes.plot(steps, smooth, color=points.get_color(), label=series[name])
        if scale == "log" and drawn and not any(value <= 0 for name in drawn for value in columns[name]):
            axes.set_yscale("log")
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if drawn:
            axes.legend(fontsize=8)
    if tokens and tokens[-1] > 0 and steps[-1] > 0:
        rate = tokens[-1] / steps[-1]
        second = figure.axes[0].secondary_xaxis("top", functions=(lambda x: x * rate, lambda x: x / rate))
        second.set_xlabel("tokens", fontsize=8)
        second.tick_params(labelsize=7)
    save_figure(figure, out_path)


def _read(path: Path) -> dict[str, list[float]]:
    """Return the columns as numbers, NaN where a value is absent."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise KvforgeError(f"The log {path} cannot be read ({error}); give the metrics.csv of a run.") from None
    if rows and "step" not in rows[0]:
        raise KvforgeError(f"{path} has no column named step; give the metrics.csv of a run.")
    columns: dict[str, list[float]] = {name: [] for name in (rows[0] if rows else {}) if name}
    for row in rows:
        if None in row.values():  # written while it was read, or cut off by a full disk
            break
        try:
            values = {name: float(row[name]) if row[name] else math.nan for name in columns}
        except ValueError:
            raise KvforgeError(f"{path} holds something that is not a number; give the metrics.csv of a run.") from None
        for name, value in values.items():
            columns[name].append(value)
    if not columns or not columns["step"]:
        raise KvforgeError(f"{path} has no steps; plot it after the first one.")
    return columns


def _smooth(values: list[float], reach: int) -> list[float]:
    """Return the mean over ``reach`` values to both sides; a NaN stays one and is left out of its neighbours."""
    result = []
    for at, value in enumerate(values):
        window = [v for v in values[max(0, at - reach) : at + reach + 1] if math.isfinite(v)]
        result.append(sum(window) / len(window) if math.isfinite(value) else math.nan)
    return result
