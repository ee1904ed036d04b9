"""Python's collector of cycles, which is of no use while millions of objects are made that stay."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Inside, cycles of objects are not looked for: that took a tenth of a build. What tensors hold is freed as always
    but where a cycle holds the tensor. The collector is the process's; afterwards it runs where it ran before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
