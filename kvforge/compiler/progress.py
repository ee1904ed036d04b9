"""A build's stages on standard error."""

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from types import TracebackType

from tqdm import tqdm

from kvforge.common.byte_sizes import format_bytes
from kvforge.common.display import Display

LONG_S = 1.0


class BuildProgress:
    """A bar of stages, and of bytes while weights are converted. Without a terminal it is a line for each stage of a
    second or more, once it is over; with a verbose display there is one for every stage. ``stage`` and ``converted``
    are what ``build_engine`` takes. What torch says meanwhile is shown if verbose."""

    def __init__(self, display: Display, stages: Sequence[str]) -> None:
        self._display, self._stages = display, stages
        self._current, self._begun, self._bytes = "", time.monotonic(), 0
        self._silence = contextlib.ExitStack()
        self._bar = tqdm(total=len(stages), file=sys.stderr, unit="stage", leave=False, disable=not display.bars)

    def stage(self, name: str) -> None:
        """A stage begins, and the one before it is over."""
        self._end_stage()
        self._current, self._begun = name, time.monotonic()
        self._bar.n = self._stages.index(name)
        self._bar.set_postfix_str("", refresh=False)
        self._bar.set_description(name)

    def converted(self, done: int, total: int) -> None:
        """So many bytes of the weights are written."""
        self._bytes = done
        self._bar.set_postfix_str(f"{format_bytes(done)} of {format_bytes(total)}")

    def _end_stage(self) -> None:
        seconds = time.monotonic() - self._begun
        if self._current and (self._display.verbose or (seconds >= LONG_S and not self._display.bars)):
            size = f", {format_bytes(self._bytes)}" if self._bytes else ""
            self._display.note(f"{self._current}: {seconds:.1f} s{size}")
        self._bytes = 0

    def __enter__(self) -> "BuildProgress":
        if not self._display.verbose:
            self._silence.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", FutureWarning)
            torch_log = logging.getLogger("torch")
            self._silence.callback(torch_log.setLevel, torch_log.level)
            torch_log.setLevel(logging.ERROR)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._end_stage()
        self._bar.close()
        self._silence.close()
