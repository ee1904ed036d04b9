"""What the commands print for a reader."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from perf.harness.tables import Row, text_table
from perf.simulation.cost_model import CostModel


def fit_table(name: str, model: CostModel, report: dict[str, Any]) -> str:
    """The prices in microseconds, and the errors."""
    lines = [f"{name}: microseconds per unit of work"]
    lines += [f"  {work:<14} {1e6 * price:>12.4f}" for work, price in model.prices.items()]
    for kind, count in (("fit", report["num_steps"]), ("held_out", report["num_held_out"])):
        error = report[f"{kind}_error"]
        lines.append(
            f"{count} {'fitted' if kind == 'fit' else 'held-out'} steps: error {error['median']:.1%} (median), "
            f"{error['max']:.1%} (worst), {error['total']:+.1%} (sum)"
        )
    return "\n".join(lines)


def validation_table(rows: Sequence[Row]) -> str:
    """Measured times and how far the simulated ones are from them, side by side."""
    kinds = (("total", "total s"), ("ttft", "TTFT s"), ("tpot", "TPOT s"))
    columns = [("variant", "variant", "<14"), ("workload", "workload", "<16")]
    for kind, title in kinds:
        columns += [(title, f"measured_{kind}_s", ">8.3f"), ("simulated", f"{kind}_error", ">+10.1%")]
    errors = {title[:-2]: median(abs(row[f"{kind}_error"]) for row in rows) for kind, title in kinds}
    told = ", ".join(f"{title} {error:.1%}" for title, error in errors.items())
    return f"{text_table(columns, rows)}\nmedian error: {told}"


def _part(kind: str, name: str) -> Callable[[Row], float]:
    return lambda row: row[kind][name]


POINTS = (
    ("variant", "variant", "<14"), ("input", "input_tokens", ">5"), ("rate", "rate", ">6.3g"),
    ("burst", "burstiness", ">5g"), ("budget", "max_num_tokens", ">6"), ("GiB", "kv_cache_gib", ">4g"),
    ("tok/s", "combined_tok_s", ">7.0f"), ("TTFT mean", _part("ttft_s", "mean"), ">9.2f"),
    ("p50", _part("ttft_s", "p50"), ">8.2f"), ("p99", _part("ttft_s", "p99"), ">8.2f"),
    ("TPOT mean", _part("tpot_s", "mean"), ">9.3f"), ("p50", _part("tpot_s", "p50"), ">7.3f"),
    ("p99", _part("tpot_s", "p99"), ">7.3f"), ("pause p99", _part("gap_s", "p99"), ">9.3f"),
    ("running", "mean_running", ">7.1f"), ("preempted", "num_preemptions", ">9"),
)  # fmt: skip


def points_table(rows: Sequence[Row]) -> str:
    """One line per simulation."""
    lines, busiest = (
        [text_table(POINTS, rows)],
        max((row["scheduler_ms"] for row in rows), key=lambda ms: ms["num_steps"]),
    )
    if busiest["num_steps"]:
        told = "scheduler at >= 95% of its sequences: {mean:.2f} ms a step, p99 {p99:.2f} ms ({num_steps} steps)"
        lines.append(told.format_map(busiest))
    return "\n".join(lines)
