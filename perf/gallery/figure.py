"""What a figure of docs/gallery.md is."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Report = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """``make`` returns the numbers, from a seed and nothing else; ``plot`` draws them into a file."""

    name: str
    make: Callable[[], Report]
    plot: Callable[[Report, Path], None]
