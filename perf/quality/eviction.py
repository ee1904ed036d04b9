"""Answers of the tiny models at 2048 tokens of context under every rule of eviction, over the budget.

    python -m perf.quality.eviction [--work DIR] [--num-prompts 40] [--rule h2o] [--budget 256] [--cut-budget 512]
        [--model "no cut"]

Most rules' graphs do not know the budget: each model has an engine for such a rule, and its copies differ in their
manifests.
Questions come last in these prompts; docs/kv-policies.md says which rules may look at them. Rules that observe every
query have no row under the cut. Everything under --work is kept: an interrupted run continues, a larger --num-prompts
asks only the new prompts. Writes OUTPUT.json, .md and .png.
"""

import argparse
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.kv_policies import Need, policies
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR
from perf.harness.experiment import Experiment, Report, option, positive
from perf.harness.plots import panels
from perf.harness.policy_engines import RULES, Cell, Engines, cells_of
from perf.harness.tables import markdown_table
from perf.quality.answers import Questions
from perf.quality.scores import AGAINST_FULL, against_full, asking, bars, task_columns

MODELS = {"no cut": TEACHER_DIR, "cut 4 of 8, 2-way": STUDENT_DIR}
BUDGETS = (64, 128, 256, 512, 1024)


def engines_of(model: str, length: int, work: Path) -> Engines:
    """Return the engines of a model."""
    slug = model.replace(", ", "-").replace(" ", "-")
    options = BuildOptions(dtype="bfloat16", max_num_seqs=16, max_seq_len=length + MAX_ANSWER_TOKENS)
    return Engines(MODELS[model], options, work / "engines", f"{slug}-{length}-")


def grid_of(models: list[str], rules: list[str], budgets: dict[str, list[int]]) -> list[tuple[str, Cell]]:
    """Return models and cells, full attention of each model first; ``budgets`` are by model."""
    without_all = [rule for rule in rules if Need.ALL_QUERIES not in policies()[rule]().needs]
    chosen = {model: rules if model == "no cut" else without_all for model in models}
    return [(model, cell) for model in models for cell in cells_of(chosen[model], budgets[model])]


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


def measure(args: argparse.Namespace) -> Report:
    """Ask every engine."""
    questions, budgets = Questions.of(args), args.budget or list(BUDGETS)
    by_model = {model: budgets if model == "no cut" else args.cut_budget or budgets for model in MODELS}
    cells = grid_of(args.model or list(MODELS), args.rule or RULES, by_model)
    results: list[dict[str, Any]] = []
    with tqdm(cells, unit="engine", disable=None) as bar:
        for model, cell in bar:
            bar.set_description(f"{model}, {cell.name} {cell.budget or ''}")
            engine = engines_of(model, args.length, args.work).of(cell)
            results.append({"model": model, "rule": cell.name, "budget": cell.budget, **questions.ask(engine)})
    rows = against_full(results, ("rule", "budget"))
    return {"prompt_tokens": args.length, "seed": args.seed, "smallest_budget": smallest(rows), "rows": rows}


def notes(report: Report) -> str:
    """What was asked, and the smallest budgets that lose nothing."""
    first, best = report["rows"][0], report["smallest_budget"]
    rules = sorted({rule for found in best.values() for rule in found})
    table = [[model, *(found.get(rule, "refused") or "none" for rule in rules)] for model, found in best.items()]
    return (
        f"Tiny models, {first['num_prompts']} prompts of {report['prompt_tokens']} tokens "
        f"({', '.join(first['tasks'])}, equally many; seed {report['seed']}), greedy, bf16. Exact match in per cent "
        "with its 95% Wilson interval; “versus full” pairs prompt by prompt: difference in points with its 95% "
        "interval (Agresti and Min 2005), prompts gained and lost, the exact McNemar p.\n\nThe smallest budget, of "
        f"those measured, from which on the paired interval includes 0:\n\n{markdown_table(['model', *rules], table)}"
    )


def columns(report: Report) -> list[tuple]:
    """Return the table's columns."""
    rule = ("rule", lambda row: "full attention" if row["budget"] is None else row["rule"])
    return [("model", "model"), rule, ("budget", "budget"), *AGAINST_FULL, *task_columns(report["rows"][0]["tasks"])]


def plot(report: Report, path: Path) -> None:
    """Exact match over the budget of each rule, a panel for each model; dashed: full attention."""
    rows = report["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    rules = sorted({row["rule"] for row in rows if row["budget"]})
    with panels(path, 7.5 * len(models), 4.6, len(models), sharey=True) as found:
        from matplotlib import colormaps

        for axes, model in zip(found, models, strict=True):
            for index, rule in enumerate(rules):
                line = sorted((r for r in rows if (r["model"], r["rule"]) == (model, rule)), key=lambda r: r["budget"])
                beside = 1.02 ** (index - len(rules) / 2)
                style = {"fmt": "o-", "markersize": 3, "capsize": 2, "color": colormaps["tab20"](index % 20)}
                if line:
                    bars(axes, [row["budget"] * beside for row in line], line, label=rule, **style)
            full = next(row for row in rows if row["model"] == model and row["budget"] is None)
            axes.axhline(100 * full["accuracy"], color="black", linestyle="--", linewidth=1, label="full attention")
            axes.set_xscale("log", base=2)
            axes.set(xlabel="budget, tokens", ylabel="exact match, %", title=model)
            axes.set_xticks(sorted({row["budget"] for row in rows if row["budget"]}), minor=False)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        told = f"Eviction, tiny models at 2048 tokens, {rows[0]['num_prompts']} prompts, 95% intervals"
        found[0].figure.suptitle(told)


EXPERIMENT = Experiment(
    "perf.quality.eviction", __doc__,
    options=(
        asking("eviction-quality", 40, 2048 - MAX_ANSWER_TOKENS, "engines and answers"),
        option("--rule", action="append", choices=RULES, help="default: all; may be given several times"),
        option("--budget", action="append", type=positive, help=f"default: {', '.join(map(str, BUDGETS))}"),
        option("--cut-budget", action="append", type=positive, help="with a cut; default: those of --budget"),
        option("--model", action="append", choices=list(MODELS), help="default: both"),
    ),
    measure=measure, title="Eviction: quality over the budget", notes=notes, columns=columns, plot=plot, figure=".png",
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
