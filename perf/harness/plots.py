"""Figures of panels side by side, as the programs draw them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure


@contextlib.contextmanager
def panels(
    path: Path, width: float, height: float, num: int = 1, legend: float = 8, which: str = "major",
    lines: int = 1, **shared: Any,
) -> Iterator[list[Any]]:  # fmt: skip
    """Yield ``num`` panels a line (axes of matplotlib, with ``shared`` what ``subplots`` shares). When the block is
    left they get a grid and, where something has a label, a legend with letters of this size; the figure lies in
    ``path``."""
    figure = new_figure(width, height)
    found = list(figure.subplots(lines, num, squeeze=False, **shared).flat)
    yield found
    for panel in found:
        panel.grid(alpha=0.3, which=which)
        if legend and panel.get_legend_handles_labels()[0] and panel.get_legend() is None:
            panel.legend(fontsize=legend)
    save_figure(figure, path)
