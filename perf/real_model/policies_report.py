"""The tables and the plot of ``perf.real_model.policies``."""

from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from perf.harness.command import Report
from perf.harness.tables import markdown_table

Row = dict[str, Any]


def by_policy(rows: list[Row]) -> dict[str, dict[int, Row]]:
    """Return the rows of every policy by budget, the policy first that is closest at its largest budget."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["budget"] is not None:
            found.setdefault(row["name"], {})[row["budget"]] = row
    return dict(sorted(found.items(), key=lambda item: item[1][max(item[1])]["kl"]["value"]))


def retrieved(row: Row | None, length: int) -> str:
    """Return the right answers of all at a length."""
    cells = [one for one in row["retrieval"] if one["length"] == length] if row else []
    return f"{cells[0]['num_correct']} of {cells[0]['num_prompts']}" if cells else ""


def markdown(report: Report) -> str:
    """Return the tables with their explanation."""
    rows = report["rows"]
    found = by_policy(rows)
    budgets = sorted({budget for own in found.values() for budget in own})
    lengths = sorted({one["length"] for row in rows for one in row["retrieval"]})
    lines = [
        f"`{report['command']}`, {report['date']}, {report['machine']}",
        "",
        f"Prompts of {report['length']} tokens, {report['num_documents']} of each kind ({', '.join(report['kinds'])}); "
        f"decode steps of the next {report['forced'] - 1} tokens beside those of the full cache. 95% intervals over "
        "documents. Retrieval: right answers under the largest budget, by tokens of the prompt.",
        "",
    ]
    head = ["policy", *(f"KL, {budget}" for budget in budgets), *(f"same best token, {budget}" for budget in budgets)]
    head += [f"retrieval, {length}" for length in lengths]
    full = next((row for row in rows if row["budget"] is None), None)
    table = [["full", *[""] * (2 * len(budgets)), *(retrieved(full, length) for length in lengths)]]
    for name, own in found.items():
        kl = [_interval(own[budget]["kl"], 3) if budget in own else "" for budget in budgets]
        same = [_interval(own[budget]["agreement"], 1, 100) if budget in own else "" for budget in budgets]
        table.append([name, *kl, *same, *(retrieved(own[max(own)], length) for length in lengths)])
    lines.append(markdown_table(head, table, "l" + "r" * (len(head) - 1)))
    return "\n".join(lines) + "\n"


def _interval(estimate: dict[str, float], digits: int, factor: float = 1) -> str:
    low, value, high = (f"{factor * estimate[part]:.{digits}f}" for part in ("low", "value", "high"))
    return f"{value} ({low} to {high})"


def plot(report: Report, path: Path) -> None:
    """KL of each policy with its interval, a mark for each budget, on a logarithmic scale."""
    found = by_policy(report["rows"])
    figure = new_figure(7.5, 1 + 0.3 * len(found))
    axes = figure.subplots()
    names = list(found)
    for budget in sorted({budget for own in found.values() for budget in own}):
        kept = [(names.index(name), own[budget]["kl"]) for name, own in found.items() if budget in own]
        values = [kl["value"] for _, kl in kept]
        bars = [[kl["value"] - kl["low"] for _, kl in kept], [kl["high"] - kl["value"] for _, kl in kept]]
        places = [place for place, _ in kept]
        axes.errorbar(values, places, xerr=bars, fmt="o", markersize=4, capsize=2, label=f"budget {budget}")
    axes.set(xscale="log", xlabel="KL(full cache ‖ policy), nats a token", yticks=range(len(names)), yticklabels=names)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    if found:
        axes.legend(fontsize=8)
    save_figure(figure, path)
