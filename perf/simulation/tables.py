"""What the commands print for a reader."""

from collections.abc import Sequence
from statistics import median
from typing import Any

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


def validation_table(rows: Sequence[dict[str, Any]]) -> str:
    """Measured times and how far the simulated ones are from them, side by side."""
    kinds = (("total", "total s"), ("ttft", "TTFT s"), ("tpot", "TPOT s"))
    head = "".join(f" {title:>8} {'simulated':>10}" for _, title in kinds)
    lines = [f"{'variant':<14} {'workload':<16}{head}"]
    for row in rows:
        numbers = "".join(f" {row[f'measured_{kind}_s']:>8.3f} {row[f'{kind}_error']:>+10.1%}" for kind, _ in kinds)
        lines.append(f"{row['variant']:<14} {row['workload']:<16}{numbers}")
    errors = {title[:-2]: median(abs(row[f"{kind}_error"]) for row in rows) for kind, title in kinds}
    lines.append("median error: " + ", ".join(f"{title} {error:.1%}" for title, error in errors.items()))
    return "\n".join(lines)


def points_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per simulation."""
    lines = [
        f"{'variant':<14} {'input':>5} {'rate':>6} {'burst':>5} {'budget':>6} {'GiB':>4} {'tok/s':>7} {'TTFT mean':>9} "
        f"{'p50':>8} {'p99':>8} {'TPOT mean':>9} {'p50':>7} {'p99':>7} {'pause p99':>9} {'running':>7} {'preempted':>9}"
    ]
    for row in rows:
        ttft, tpot = row["ttft_s"], row["tpot_s"]
        lines.append(
            f"{row['variant']:<14} {row['input_tokens']:>5} {row['rate']:>6.3g} {row['burstiness']:>5g} "
            f"{row['max_num_tokens']:>6} {row['kv_cache_gib']:>4g} {row['combined_tok_s']:>7.0f} {ttft['mean']:>9.2f} "
            f"{ttft['p50']:>8.2f} {ttft['p99']:>8.2f} {tpot['mean']:>9.3f} {tpot['p50']:>7.3f} {tpot['p99']:>7.3f} "
            f"{row['gap_s']['p99']:>9.3f} {row['mean_running']:>7.1f} {row['num_preemptions']:>9}"
        )
    busiest = max(rows, key=lambda row: row["scheduler_ms"]["num_steps"])["scheduler_ms"]
    if busiest["num_steps"]:
        lines.append(
            f"scheduler at >= 95% of its sequences: {busiest['mean']:.2f} ms a step, p99 {busiest['p99']:.2f} ms "
            f"({busiest['num_steps']} steps)"
        )
    return "\n".join(lines)
