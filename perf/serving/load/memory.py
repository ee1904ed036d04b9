"""Memory of a server's processes over time: samples, the slope of each, a figure."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from perf.harness.plots import panels
from perf.serving.load.processes import memory_of


class MemoryLog:
    """Samples by role; ``pids`` gives role to pid anew for every sample, so that a restarted process is followed."""

    def __init__(self, pids: Callable[[], dict[str, int]], period_s: float = 5.0) -> None:
        self._pids, self._period_s = pids, period_s
        self._started = time.monotonic()
        self.samples: dict[str, list[tuple[float, float, float]]] = {}
        """Role to (seconds since the start, PSS, RSS in MiB)."""

    def sample(self) -> None:
        now = time.monotonic() - self._started
        for role, pid in self._pids().items():
            memory = memory_of(pid)
            if memory is not None:
                self.samples.setdefault(role, []).append((now, memory.pss, memory.rss))

    async def run(self) -> None:
        """Sample until cancelled, and once more then."""
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                self.sample()
                await asyncio.sleep(self._period_s)
        self.sample()

    def peak_mib(self) -> dict[str, float]:
        """Role to its greatest PSS."""
        return {role: max(pss for _, pss, _ in samples) for role, samples in self.samples.items()}

    def slopes(self, warm_up_s: float) -> dict[str, float | None]:
        """Role to the slope of its RSS in MiB per hour after ``warm_up_s``: PSS also moves when processes outside the
        server begin or end to share a library."""
        arrays = {role: np.array(samples) for role, samples in self.samples.items()}
        return {role: slope_mib_per_hour(a[:, 0], a[:, 2], warm_up_s) for role, a in arrays.items()}


def slope_mib_per_hour(seconds: np.ndarray, mib: np.ndarray, warm_up_s: float) -> float | None:
    """Least-squares slope of ``mib`` over ``seconds`` from ``warm_up_s`` on; None with fewer than two samples."""
    kept = seconds >= warm_up_s
    if kept.sum() < 2:
        return None
    return float(np.polyfit(seconds[kept], mib[kept], 1)[0] * 3600)


def plot_memory(samples_of: Mapping[str, Sequence[Sequence[float]]], path: Path, warm_up_s: float) -> None:
    """RSS of every role of ``MemoryLog.samples`` over minutes, above its value at the end of the warm-up."""
    with panels(path, 9, 4, legend=7) as (panel,):
        for role, samples in samples_of.items():
            seconds, _, rss = np.array(samples).T
            base = rss[min(int(np.searchsorted(seconds, warm_up_s)), len(rss) - 1)]
            panel.plot(seconds / 60, rss - base, label=f"{role} ({base:.0f} MiB)")
        panel.axvline(warm_up_s / 60, color="grey", lw=0.8, ls=":")
        panel.set(xlabel="minutes", ylabel="RSS above its value after warm-up, MiB")
