"""The tables and the plot of ``perf.real_model.policies``."""

from pathlib import Path

from perf.harness.experiment import Report, Row, columns_table, interval, told
from perf.harness.plots import panels


def by_policy(rows: list[Row]) -> dict[str, dict[int, Row]]:
    """Return the rows of every policy by budget, the policy first that is closest at its largest budget."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["budget"] is not None:
            found.setdefault(row["name"], {})[row["budget"]] = row
    return dict(sorted(found.items(), key=lambda item: item[1][max(item[1])]["kl"]["value"]))


def columns(report: Report) -> list[tuple]:
    """Return the columns of rows by policy, each of its own rows by budget; the full cache has budget 0."""
    budgets = sorted({row["budget"] for row in report["rows"]} - {None})
    lengths = sorted({one["length"] for row in report["rows"] for one in row["retrieval"]})

    def estimate(own: Row, budget: int, key: str, digits: int, factor: float = 1) -> str:
        return interval(own[budget][key], digits, factor) if budget in own else ""

    def retrieved(own: Row, length: int) -> str:
        found = [one for one in own[max(own, key=int)]["retrieval"] if one["length"] == length]
        return f"{found[0]['num_correct']} of {found[0]['num_prompts']}" if found else ""

    return [
        ("policy", lambda own: next(iter(own.values()))["name"]),
        *((f"KL, {n}", lambda own, n=n: estimate(own, n, "kl", 3)) for n in budgets),
        *((f"same best token, {n}", lambda own, n=n: estimate(own, n, "agreement", 1, 100)) for n in budgets),
        *((f"retrieval, {n}", lambda own, n=n: retrieved(own, n)) for n in lengths),
    ]  # fmt: skip


def markdown(report: Report) -> str:
    """Return the table with its explanation."""
    full = [{0: row} for row in report["rows"] if row["budget"] is None] or [{0: {"name": "full", "retrieval": []}}]
    made = columns(report)
    notes = (
        f"Prompts of {report['length']} tokens, {report['num_documents']} of each kind ({', '.join(report['kinds'])}); "
        f"decode steps of the next {report['forced'] - 1} tokens beside those of the full cache. 95% intervals over "
        "documents. Retrieval: right answers under the largest budget, by tokens of the prompt."
    )
    table = columns_table(made, [*full, *by_policy(report["rows"]).values()], "l" + "r" * (len(made) - 1))
    return f"{told(report)}\n\n{notes}\n\n{table}\n"


def plot(report: Report, path: Path) -> None:
    """KL of each policy with its interval, a mark for each budget, on a logarithmic scale."""
    found = by_policy(report["rows"])
    names = list(found)
    with panels(path, 7.5, 1 + 0.3 * len(found)) as (axes,):
        for budget in sorted({budget for own in found.values() for budget in own}):
            kept = [(names.index(name), own[budget]["kl"]) for name, own in found.items() if budget in own]
            values = [kl["value"] for _, kl in kept]
            bars = [[kl["value"] - kl["low"] for _, kl in kept], [kl["high"] - kl["value"] for _, kl in kept]]
            style = {"fmt": "o", "markersize": 4, "capsize": 2, "label": f"budget {budget}"}
            axes.errorbar(values, [place for place, _ in kept], xerr=bars, **style)
        label = "KL(full cache ‖ policy), nats a token"
        axes.set(xscale="log", xlabel=label, yticks=range(len(names)), yticklabels=names)
        axes.invert_yaxis()
