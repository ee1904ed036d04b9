"""What a command shows on standard error beside errors."""

import sys
from dataclasses import dataclass


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
