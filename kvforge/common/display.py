"""What a command shows on standard error beside errors."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvforge.common.errors import CheckpointWarning


@dataclass(frozen=True)
class Display:
    """``quiet``: neither bars nor notes. ``verbose``: also what is done, and where errors come from."""

    quiet: bool = False
    verbose: bool = False

    @property
    def bars(self) -> bool:
        """Whether progress bars are shown: on a terminal, unless quiet."""
        return not self.quiet and sys.stderr.isatty()

    def note(self, text: str) -> None:
        """Write a line, unless quiet."""
        if not self.quiet:
            print(f"kvforge: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def checkpoint_warnings(self) -> Iterator[None]:
        """Within the block each CheckpointWarning is a note, once."""
        shown: set[str] = set()
        with warnings.catch_warnings():
            warnings.simplefilter("always", CheckpointWarning)
            show_others = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
                if not issubclass(category, CheckpointWarning):
                    show_others(message, category, *place, **more)
                elif str(message) not in shown:
                    shown.add(str(message))
                    self.note(str(message))

            warnings.showwarning = show
            yield
