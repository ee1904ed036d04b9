"""Calls into native libraries whose failures are no Exception.

A library written in Rust turns a panic into `pyo3_runtime.PanicException`, which derives from BaseException: `except
Exception` lets it through, and it ends the thread or process that made the call. Each library has a class of its own,
which cannot be imported, so it is known by its name.
"""

from types import TracebackType

from kvforge.common.errors import KvforgeError


def is_panic(error: BaseException | None) -> bool:
    """Whether ``error`` is a panic of a native library. KeyboardInterrupt, SystemExit and a task's cancellation are
    not."""
    kind = type(error)
    return kind.__name__ == "PanicException" and kind.__module__ == "pyo3_runtime"


class panics_as:
    """``with panics_as(RequestError, "the text cannot be tokenized"):`` raises that error instead of a panic. All other
    errors pass. The panic's own text, which may name files, goes to the process's stderr alone."""

    __slots__ = ("_error", "_words")

    def __init__(self, error: type[KvforgeError], *words: str) -> None:
        self._error = error
        self._words = words

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and is_panic(error):
            raise self._error(*self._words) from None
