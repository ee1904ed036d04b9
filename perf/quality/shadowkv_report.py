"""The table and the plot of ``perf.quality.shadowkv``."""

from functools import partial
from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from perf.harness.tables import markdown_table
from perf.quality.scores import accuracy, difference, flat, interval, keep_report, points, spread, texts_changed

ENOUGH = 0.99
"""The share of full attention's right answers that a budget and rank are to keep."""


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per engine: accuracy with its 95% Wilson interval, per task, and, against the same model's full
    attention, the share of its accuracy, the difference paired by prompt, and how many texts are not the same."""
    full = {result["model"]: result for result in results if result["sparse_budget"] is None}
    rows = []
    for result in results:
        row: dict[str, Any] = {key: result[key] for key in ("model", "sparse_budget", "rank")} | accuracy(result)
        other = full[result["model"]]
        if other is not result:
            row["share_of_full"] = sum(flat(result["correct"])) / max(1, sum(flat(other["correct"])))
            row["versus_full"] = difference(other, result)
            row["texts_changed"] = texts_changed(other, result)
        rows.append(row)
    return rows


def enough(rows: list[dict[str, Any]]) -> tuple[int, int] | None:
    """Return the (budget, rank) of the least budget, then rank, that keeps ``ENOUGH`` for every model; None if none."""
    models = {row["model"] for row in rows}
    kept: dict[tuple[int, int], set[str]] = {}
    for row in rows:
        if row.get("share_of_full", 0) >= ENOUGH:
            kept.setdefault((row["sparse_budget"], row["rank"]), set()).add(row["model"])
    return min((cell for cell, who in kept.items() if who == models), default=None)


def markdown(rows: list[dict[str, Any]], settings: dict[str, Any]) -> str:
    """Return the table with its explanation."""
    tasks = list(rows[0]["tasks"])
    chosen = enough(rows)
    verdict = (
        "No cell keeps 99% of full attention's right answers in every model."
        if chosen is None
        else f"The least budget and rank that keep 99% of full attention's right answers in every model: a budget of "
        f"{chosen[0]} tokens at rank {chosen[1]}."
    )
    head = ["model", "budget", "rank", "exact match", "of full", "versus full", "texts changed", *tasks]
    lines = [
        "# ShadowKV: quality over budget and rank",
        "",
        f"Tiny models, {rows[0]['num_prompts']} prompts of {settings['prompt_tokens']} tokens ({', '.join(tasks)}, "
        f"equally many; seed {settings['seed']}), greedy, bf16, through engines built with this budget and rank, "
        f"chunks of {settings['chunk_size']}, {settings['num_outlier_chunks']} outlier chunks, 32 local tokens. "
        "Exact match in per cent with "
        "its 95% Wilson interval; “versus full” pairs prompt by prompt: difference in points with its 95% interval "
        "(Agresti and Min 2005), prompts gained and lost, the exact McNemar p. The keys of a token have 128 "
        "dimensions, so rank 128 is all of them.",
        "",
        verdict,
        "",
    ]
    table = []
    for row in rows:
        values = [row["model"], "full attention", "", interval(row), "", "", ""]
        if row["sparse_budget"] is not None:
            values[1:3] = row["sparse_budget"], row["rank"]
            values[4:] = f"{100 * row['share_of_full']:.1f}%", points(row["versus_full"]), row["texts_changed"]
        table.append([*values, *(f"{100 * row['tasks'][task]:.1f}" for task in tasks)])
    return "\n".join([*lines, markdown_table(head, table)]) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Exact match over the budget, left, and over the rank, right, of each model; dashed: full attention."""
    figure = new_figure(11, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    models = list(dict.fromkeys(row["model"] for row in rows))
    sparse = [row for row in rows if row["sparse_budget"] is not None]
    for axes, x, other, label in (
        (panels[0], "sparse_budget", "rank", "sparse budget, tokens"),
        (panels[1], "rank", "sparse_budget", "rank of the keys"),
    ):
        for index, model in enumerate(models):
            colour = f"C{index}"
            for fixed in sorted({row[other] for row in sparse}):
                line = sorted((r for r in sparse if r["model"] == model and r[other] == fixed), key=lambda r: r[x])
                if len(line) > 1:
                    name = f"{model}, {'rank' if other == 'rank' else 'budget'} {fixed}"
                    _line(axes, [row[x] for row in line], line, colour, name)
            full = next(row for row in rows if row["model"] == model and row["sparse_budget"] is None)
            axes.axhline(100 * full["accuracy"], color=colour, linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set(xlabel=label, ylabel="exact match, %")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"ShadowKV, tiny models at 2048 tokens, {rows[0]['num_prompts']} prompts, 95% intervals")
    save_figure(figure, path)


def _line(axes: Any, x: list[int], rows: list[dict[str, Any]], colour: str, label: str) -> None:
    values = [row["accuracy"] for row in rows]
    percent, lengths = [100 * value for value in values], spread(values, rows)
    axes.errorbar(x, percent, yerr=lengths, fmt="o-", capsize=3, color=colour, label=label)


def write_report(results: list[dict[str, Any]], settings: dict[str, Any], output: Path) -> None:
    """Write ``output`` with the suffixes .json, .md and .png."""
    rows = summarise(results)
    content = {**settings, "enough": enough(rows), "rows": rows}
    keep_report(output, content, markdown(rows, settings), partial(plot, rows))
