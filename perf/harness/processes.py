"""Long work in several processes, with a bar."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tqdm import tqdm


def make_all(make: Callable[..., object], calls: Sequence[tuple[Any, ...]], jobs: int, what: str) -> None:
    """Call ``make`` with the arguments of each call, ``jobs`` at a time, each in a process that was not forked."""
    with (
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool,
        tqdm(total=len(calls), desc=what, unit="model") as bar,
    ):
        for future in [pool.submit(make, *arguments) for arguments in calls]:
            future.result()
            bar.update()
