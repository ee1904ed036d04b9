"""Figures of the experiments."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvforge.common.figures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]


def plot_lengths(rows: Sequence[Row], path: Path) -> None:
    """Combined throughput by input length, a line per variant."""
    figure = new_figure(6, 4)
    panel = figure.subplots()
    _lines(panel, rows, "input_tokens", lambda row: row["combined_tok_s"])
    panel.set(xlabel="input tokens", ylabel="prompt + output tokens per second", ylim=(0, None))
    save_figure(figure, path)


def plot_rates(rows: Sequence[Row], path: Path) -> None:
    """Mean and 99th percentile of TTFT and TPOT by arrival rate."""
    figure = new_figure(10, 4)
    panels = figure.subplots(1, 2)
    for panel, kind in zip(panels, ("ttft_s", "tpot_s"), strict=True):
        for statistic, style in (("mean", "-"), ("p99", ":")):
            _lines(panel, rows, "rate", lambda row, k=kind, s=statistic: row[k][s], style, f", {statistic}")
        panel.set(yscale="log", xlabel="requests per second")
    panels[0].set(ylabel="time to first token, s")
    panels[1].set(ylabel="time per output token, s")
    cv2 = 1 / rows[0]["burstiness"]
    figure.suptitle("Poisson arrivals" if cv2 == 1 else f"arrivals in bursts (Gamma pauses, CV² = {cv2:g})")
    save_figure(figure, path)


def plot_served_lengths(rows: Sequence[Row], path: Path) -> None:
    """Combined throughput by input length, simulated (lines) and measured (dots)."""
    figure = new_figure(6, 4)
    panel = figure.subplots()

    def throughput(kind: str) -> Callable[[Row], float]:
        return lambda row: row["num_requests"] * (row["input_tokens"] + row["output_tokens"]) / row[f"{kind}_total_s"]

    _lines(panel, rows, "input_tokens", throughput("simulated"), "-", ", simulated", marker="")
    _lines(panel, rows, "input_tokens", throughput("measured"), "", ", measured", marker="o")
    panel.set(xlabel="input tokens", ylabel="prompt + output tokens per second", ylim=(0, None))
    save_figure(figure, path)


def plot_served_rates(rows: Sequence[Row], path: Path) -> None:
    """Mean TTFT and TPOT by arrival rate, simulated (lines) and measured (dots)."""
    figure = new_figure(10, 4)
    panels = figure.subplots(1, 2)
    for panel, what, title in zip(panels, ("ttft", "tpot"), ("to first token", "per output token"), strict=True):
        _lines(panel, rows, "rate", lambda row, w=what: row[f"simulated_{w}_s"], "-", ", simulated", marker="")
        _lines(panel, rows, "rate", lambda row, w=what: row[f"measured_{w}_s"], "", ", measured", marker="o")
        panel.set(yscale="log", xlabel="requests per second", ylabel=f"time {title}, s, mean")
    save_figure(figure, path)


def plot_budgets(rows: Sequence[Row], path: Path) -> None:
    """Throughput of requests that are all there; TTFT, TPOT and the longest pauses of those that arrive over time."""
    figure = new_figure(11, 7)
    panels = figure.subplots(2, 2)
    at_once, over_time = ([row for row in rows if (row["rate"] > 0) == arriving] for arriving in (False, True))
    _lines(panels[0, 0], at_once, "max_num_tokens", lambda row: row["combined_tok_s"])
    _lines(panels[0, 1], over_time, "max_num_tokens", lambda row: row["ttft_s"]["mean"], "-", ", mean")
    _lines(panels[0, 1], over_time, "max_num_tokens", lambda row: row["ttft_s"]["p99"], ":", ", p99")
    _lines(panels[1, 0], over_time, "max_num_tokens", lambda row: row["tpot_s"]["p99"])
    _lines(panels[1, 1], over_time, "max_num_tokens", lambda row: row["gap_s"]["p99"])
    titles = (
        "prompt + output tokens per second",
        "time to first token, s",
        "TPOT p99, s",
        "pause between tokens p99, s",
    )
    for panel, title in zip(panels.flat, titles, strict=True):
        panel.set_xscale("log", base=2)
        panel.set(xlabel="tokens a step (max_num_tokens)", ylabel=title)
    panels[0, 0].set(ylim=(0, None))
    for panel in panels.flat[1:]:
        panel.set(yscale="log")
    save_figure(figure, path)


def plot_memory(rows: Sequence[Row], path: Path) -> None:
    """Combined throughput and preemptions by the size of the pool."""
    figure = new_figure(10, 4)
    panels = figure.subplots(1, 2)
    _lines(panels[0], rows, "kv_cache_gib", lambda row: row["combined_tok_s"])
    _lines(panels[1], rows, "kv_cache_gib", lambda row: row["num_preemptions"])
    for panel, title in zip(panels, ("prompt + output tokens per second", "preemptions"), strict=True):
        panel.set_xscale("log", base=2)
        panel.set(xlabel="K,V cache, GiB", ylabel=title, ylim=(0, None))
    save_figure(figure, path)


def _lines(
    panel: "Axes",
    rows: Sequence[Row],
    x: str,
    y: Callable[[Row], float],
    style: str = "-",
    suffix: str = "",
    marker: str = "o",
) -> None:
    for i, variant in enumerate(dict.fromkeys(row["variant"] for row in rows)):
        line = [row for row in rows if row["variant"] == variant]
        panel.plot(
            [row[x] for row in line],
            list(map(y, line)),
            linestyle=style or "none",
            marker=marker,
            ms=3,
            color=f"C{i}",
            label=variant + suffix,
        )
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize=7)


CURVES = {"lengths": plot_served_lengths, "rates": plot_served_rates}
"""Figures of `--validate --workloads`."""
PLOTS = {
    "lengths": plot_lengths, "rates": plot_rates, "bursts": plot_rates, "budgets": plot_budgets, "memory": plot_memory,
}  # fmt: skip
