"""What a command shows on standard error beside errors."""

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvforge.common.errors import CheckpointWarning

PERIOD_S = 30.0
"""How often a line says how far something is, where there is no terminal."""


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
    def progress(self, unit: str) -> Iterator[Callable[[int, int, str], None]]:
        """Yield what is told how far something is: how many of how many, and what is being done, or "". On a terminal
        that is a bar, elsewhere a line each half minute; nothing if quiet."""
        if self.bars:
            from tqdm import tqdm

            with tqdm(unit=unit, leave=False) as bar:

                def move(done: int, total: int, stage: str) -> None:
                    bar.set_description(stage, refresh=False)
                    bar.total, bar.n = total, done
                    bar.refresh()

                yield move
            return
        last = time.monotonic()

        def say(done: int, total: int, stage: str) -> None:
            nonlocal last
            if time.monotonic() - last >= PERIOD_S:
                last = time.monotonic()
                self.note(f"{stage}{': ' if stage else ''}{done} of {total} {unit}s")

        yield say

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
