"""Table and figure of ``perf.quality.chains``."""

from pathlib import Path
from statistics import mean
from typing import Any

from kvforge.tasks.chains import HOPS
from perf.harness.plots import panels
from perf.quality.scores import interval_of_mean

GROUPS = {"told": (0,), "1–2 links": (1, 2), "3–5 links": (3, 4, 5), "6–8 links": (6, 7, 8), "all": HOPS}
"""Columns: answers that stand in the text, and those that so many links lie before."""


def shares(row: dict[str, Any], hops: tuple[int, ...]) -> list[float]:
    """Return by seed the share of right answers among those so many links away."""
    tasks = [f"chain_{each}" for each in hops if f"chain_{each}" in row["num_answers"]]
    num = sum(row["num_answers"][task] for task in tasks)
    return [sum(right) / num for right in zip(*(row["right"][task] for task in tasks), strict=True)]


def _share(values: list[float]) -> str:
    if len(values) == 1:
        return f"{100 * values[0]:.1f}"
    middle, low, high = (100 * value for value in interval_of_mean(values))
    return f"{middle:.1f} ({max(low, 0):.1f} to {min(high, 100):.1f})"


def _kl(row: dict[str, Any]) -> str:
    before, after = ([pair[place] for pair in row["kl"]] for place in (0, 1))
    return f"{mean(before):.3f} to {mean(after):.4f}" if row["kl"] else ""


COLUMNS = (
    ("variant", "variant"), ("prefill −%", "prefill_reduction", ".1f", 100), ("KL", _kl),
    *((name, lambda row, hops=hops: _share(shares(row, hops))) for name, hops in GROUPS.items()),
)  # fmt: skip


def notes(report: dict[str, Any]) -> str:
    """What was asked, and how often."""
    answers = report["rows"][0]["num_answers"]
    counts = ", ".join(f"{sum(answers[f'chain_{hop}'] for hop in hops)} {name}" for name, hops in GROUPS.items())
    return (
        f"Students of `tiny-chains` from the paper's init, distilled with seeds {', '.join(map(str, report['seeds']))} "
        f"for {report['steps']} steps of {report['tokens_per_step']} tokens: answers that are right, in per cent, by "
        f"how many links lie between the name asked for and the amount ({counts}; {report['documents']} held-out "
        "documents, greedy, float32). With several seeds the mean with the 95% interval of Student's t. KL(teacher ‖ "
        "student) in nats per token before and after distillation, mean of the seeds."
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw right answers over the share of layers skipped, a panel each for students before and after distillation."""
    teacher, *rows = report["rows"]
    titles = (("before distillation", None), ("distilled, SwiftKV's weights", "partial"))
    with panels(path, 11, 4.2, 2, legend=0, sharey=True) as found:
        for axes, (title, train) in zip(found, titles, strict=True):
            chosen = [teacher, *(row for row in rows if row["train"] == train)]
            skipped = [100 * row["prefill_reduction"] for row in chosen]
            for name, hops in list(GROUPS.items())[:-1]:
                values = [shares(row, hops) for row in chosen]
                middle = [100 * mean(value) for value in values]
                spread = [[100 * abs(mean(v) - edge(v)) for v in values] for edge in (min, max)]
                axes.errorbar(skipped, middle, spread, fmt="o-", capsize=3, label=name)
            axes.set(title=title, xlabel="layers that prompt tokens skip, %")
        found[0].set_ylabel("right answers, % (bars: lowest and highest seed)")
        found[0].legend()
