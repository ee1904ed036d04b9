"""Figures of the experiments."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perf.harness.plots import panels
from perf.harness.tables import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THROUGHPUT = "prompt + output tokens per second"
TIMES = ("to first token", "per output token")


def plot_lengths(rows: Sequence[Row], path: Path) -> None:
    """Combined throughput by input length, a line per variant."""
    with panels(path, 6, 4, legend=7, which="both") as (panel,):
        _lines(panel, rows, "input_tokens", lambda row: row["combined_tok_s"])
        panel.set(xlabel="input tokens", ylabel=THROUGHPUT, ylim=(0, None))


def plot_rates(rows: Sequence[Row], path: Path) -> None:
    """Mean and 99th percentile of TTFT and TPOT by arrival rate."""
    with panels(path, 10, 4, 2, legend=7, which="both") as both:
        for panel, kind, title in zip(both, ("ttft_s", "tpot_s"), TIMES, strict=True):
            for statistic, style in (("mean", "-"), ("p99", ":")):
                _lines(panel, rows, "rate", lambda row, k=kind, s=statistic: row[k][s], style, f", {statistic}")
            panel.set(yscale="log", xlabel="requests per second", ylabel=f"time {title}, s")
        cv2 = 1 / rows[0]["burstiness"]
        told = "Poisson arrivals" if cv2 == 1 else f"arrivals in bursts (Gamma pauses, CV² = {cv2:g})"
        both[0].figure.suptitle(told)


def _both(panel: "Axes", rows: Sequence[Row], x: str, y: Callable[[Row, str], float]) -> None:
    """What was simulated (lines) and measured (dots)."""
    _lines(panel, rows, x, lambda row: y(row, "simulated"), "-", ", simulated", marker="")
    _lines(panel, rows, x, lambda row: y(row, "measured"), "", ", measured", marker="o")


def plot_served_lengths(rows: Sequence[Row], path: Path) -> None:
    """Combined throughput by input length, simulated (lines) and measured (dots)."""

    def throughput(row: Row, kind: str) -> float:
        return row["num_requests"] * (row["input_tokens"] + row["output_tokens"]) / row[f"{kind}_total_s"]

    with panels(path, 6, 4, legend=7, which="both") as (panel,):
        _both(panel, rows, "input_tokens", throughput)
        panel.set(xlabel="input tokens", ylabel=THROUGHPUT, ylim=(0, None))


def plot_served_rates(rows: Sequence[Row], path: Path) -> None:
    """Mean TTFT and TPOT by arrival rate, simulated (lines) and measured (dots)."""
    with panels(path, 10, 4, 2, legend=7, which="both") as both:
        for panel, what, title in zip(both, ("ttft", "tpot"), TIMES, strict=True):
            _both(panel, rows, "rate", lambda row, kind, w=what: row[f"{kind}_{w}_s"])
            panel.set(yscale="log", xlabel="requests per second", ylabel=f"time {title}, s, mean")


def plot_budgets(rows: Sequence[Row], path: Path) -> None:
    """Throughput of requests that are all there; TTFT, TPOT and the longest pauses of those that arrive over time."""
    at_once, over_time = ([row for row in rows if (row["rate"] > 0) == arriving] for arriving in (False, True))
    titles = (THROUGHPUT, "time to first token, s", "TPOT p99, s", "pause between tokens p99, s")
    with panels(path, 11, 7, 2, legend=7, which="both", lines=2) as four:
        _lines(four[0], at_once, "max_num_tokens", lambda row: row["combined_tok_s"])
        _lines(four[1], over_time, "max_num_tokens", lambda row: row["ttft_s"]["mean"], "-", ", mean")
        _lines(four[1], over_time, "max_num_tokens", lambda row: row["ttft_s"]["p99"], ":", ", p99")
        _lines(four[2], over_time, "max_num_tokens", lambda row: row["tpot_s"]["p99"])
        _lines(four[3], over_time, "max_num_tokens", lambda row: row["gap_s"]["p99"])
        for panel, title in zip(four, titles, strict=True):
            panel.set_xscale("log", base=2)
            panel.set(xlabel="tokens a step (max_num_tokens)", ylabel=title)
        four[0].set(ylim=(0, None))
        for panel in four[1:]:
            panel.set(yscale="log")


def plot_memory(rows: Sequence[Row], path: Path) -> None:
    """Combined throughput and preemptions by the size of the pool."""
    shown = ("combined_tok_s", THROUGHPUT), ("num_preemptions", "preemptions")
    with panels(path, 10, 4, 2, legend=7, which="both") as both:
        for panel, (key, title) in zip(both, shown, strict=True):
            _lines(panel, rows, "kv_cache_gib", lambda row, key=key: row[key])
            panel.set_xscale("log", base=2)
            panel.set(xlabel="K,V cache, GiB", ylabel=title, ylim=(0, None))


def _lines(
    panel: "Axes", rows: Sequence[Row], x: str, y: Callable[[Row], float], style: str = "-", suffix: str = "",
    marker: str = "o",
) -> None:  # fmt: skip
    for i, variant in enumerate(dict.fromkeys(row["variant"] for row in rows)):
        line = [row for row in rows if row["variant"] == variant]
        look = {"linestyle": style or "none", "marker": marker, "ms": 3, "color": f"C{i}", "label": variant + suffix}
        panel.plot([row[x] for row in line], list(map(y, line)), **look)


CURVES = {"lengths": plot_served_lengths, "rates": plot_served_rates}
"""Figures of `--validate --workloads`."""
PLOTS = {
    "lengths": plot_lengths, "rates": plot_rates, "bursts": plot_rates, "budgets": plot_budgets, "memory": plot_memory
}  # fmt: skip
