"""The tables and the plot of ``perf.quality.eviction``."""

from functools import partial
from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from perf.harness.tables import markdown_table
from perf.quality.scores import accuracy, difference, flat, interval, keep_report, points, spread


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per engine: accuracy with its 95% Wilson interval, and, against the same model's full attention,
    the share of its accuracy and the difference paired by prompt."""
    full = {result["model"]: result for result in results if result["budget"] is None}
    rows = []
    for result in results:
        row: dict[str, Any] = {key: result[key] for key in ("model", "rule", "budget")} | accuracy(result)
        other = full[result["model"]]
        if other is not result:
            row["share_of_full"] = sum(flat(result["correct"])) / max(1, sum(flat(other["correct"])))
            row["versus_full"] = difference(other, result)
        rows.append(row)
    return rows


def smallest(rows: list[dict[str, Any]]) -> dict[str, dict[str, int | None]]:
    """Return by model and rule the smallest budget whose paired interval, and that of all larger ones, includes 0."""
    found: dict[str, dict[str, int | None]] = {}
    for row in sorted((row for row in rows if row["budget"]), key=lambda row: -row["budget"]):
        of_model = found.setdefault(row["model"], {})
        paired = row["versus_full"]
        key, lost = row["rule"], f"{row['rule']} lost"
        of_model.setdefault(key, None)
        if paired["low"] <= 0 <= paired["high"] and lost not in of_model:
            of_model[key] = row["budget"]
        elif not paired["low"] <= 0 <= paired["high"]:
            of_model[lost] = None
    return {
        model: {rule: budget for rule, budget in sorted(rules.items()) if not rule.endswith(" lost")}
        for model, rules in found.items()
    }


def markdown(rows: list[dict[str, Any]], settings: dict[str, Any]) -> str:
    """Return the tables with their explanation."""
    tasks = list(rows[0]["tasks"])
    lines = [
        "# Eviction: quality over the budget",
        "",
        f"Tiny models, {rows[0]['num_prompts']} prompts of {settings['prompt_tokens']} tokens ({', '.join(tasks)}, "
        f"equally many; seed {settings['seed']}), greedy, bf16. Exact match in per cent with its 95% Wilson interval; "
        "“versus full” pairs prompt by prompt: difference in points with its 95% interval (Agresti and Min 2005), "
        "prompts gained and lost, the exact McNemar p.",
        "",
        f"`{settings['command']}`",
        "",
        "The smallest budget, of those measured, from which on the paired interval includes 0:",
        "",
    ]
    best = smallest(rows)
    rules = sorted({rule for found in best.values() for rule in found})
    lines.append(
        markdown_table(
            ["model", *rules],
            [[model, *(_budget(found, rule) for rule in rules)] for model, found in best.items()],
        )
    )
    head = ["model", "rule", "budget", "exact match", "of full", "versus full", *tasks]
    table = []
    for row in rows:
        values = [row["model"], "full attention", "", interval(row), "", ""]
        if row["budget"] is not None:
            values[1:3] = row["rule"], row["budget"]
            values[4:] = f"{100 * row['share_of_full']:.1f}%", points(row["versus_full"])
        table.append([*values, *(f"{100 * row['tasks'][task]:.1f}" for task in tasks)])
    return "\n".join([*lines, "", markdown_table(head, table)]) + "\n"


def _budget(found: dict[str, int | None], rule: str) -> str:
    if rule not in found:
        return "refused"
    return "none" if found[rule] is None else str(found[rule])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Exact match over the budget of each rule, a panel for each model; dashed: full attention."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    from matplotlib import colormaps

    colors = colormaps["tab20"]
    figure = new_figure(7.5 * len(models), 4.6)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    rules = sorted({row["rule"] for row in rows if row["budget"]})
    for axes, model in zip(panels, models, strict=True):
        for index, rule in enumerate(rules):
            line = sorted((r for r in rows if r["model"] == model and r["rule"] == rule), key=lambda r: r["budget"])
            if not line:
                continue
            values = [row["accuracy"] for row in line]
            budgets = [row["budget"] * 1.02 ** (index - len(rules) / 2) for row in line]  # bars beside each other
            percent, lengths = [100 * value for value in values], spread(values, line)
            axes.errorbar(
                budgets, percent, yerr=lengths, fmt="o-", markersize=3, capsize=2, color=colors(index % 20), label=rule
            )
        full = next(row for row in rows if row["model"] == model and row["budget"] is None)
        axes.axhline(100 * full["accuracy"], color="black", linestyle="--", linewidth=1, label="full attention")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="budget, tokens", ylabel="exact match, %", title=model)
        axes.grid(alpha=0.3)
        axes.set_xticks(sorted({row["budget"] for row in rows if row["budget"]}), minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(f"Eviction, tiny models at 2048 tokens, {rows[0]['num_prompts']} prompts, 95% intervals")
    save_figure(figure, path)


def write_report(results: list[dict[str, Any]], settings: dict[str, Any], output: Path) -> None:
    """Write ``output`` with the suffixes .json, .md and .png."""
    rows = summarise(results)
    content = {**settings, "smallest_budget": smallest(rows), "rows": rows}
    keep_report(output, content, markdown(rows, settings), partial(plot, rows))
