"""Answers of the tiny models at 2048 tokens of context under ShadowKV, over the sparse budget and the rank.

    python -m perf.quality.shadowkv [--work DIR] [--num-prompts 40] [--cell 256:64] [--model "no cut"]

A cell is a budget in tokens and a rank, BUDGET:RANK; each has an engine, as both are constants of its graphs. Prompts
of 2000 tokens leave 48 for the answer; they have 246 chunks of 8, of which 8 are outliers here (the paper's 48 are
made for 16384 chunks). Everything under --work is kept: an interrupted run continues, a larger --num-prompts asks only
the new prompts, and the report is of all cells asked for. Writes OUTPUT.json, .md and .png.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine
from perf.harness.experiment import Experiment, Report, option
from perf.harness.plots import panels
from perf.quality.answers import Questions
from perf.quality.scores import AGAINST_FULL, against_full, asking, bars, task_columns

MODELS = {"no cut": TEACHER_DIR, "cut 4 of 8, 2-way": STUDENT_DIR}
BUDGETS, RANKS = (64, 256, 512, 1024), (8, 32, 64, 128)


@dataclass(frozen=True)
class Cell:
    """A budget in tokens and a rank."""

    budget: int
    rank: int


CROSS = tuple(dict.fromkeys([*(Cell(n, 128) for n in BUDGETS), *(Cell(256, r) for r in RANKS)]))
"""The cells of a run that names none: all budgets at full rank, all ranks at one budget."""
ENOUGH = 0.99
"""The share of full attention's right answers that a budget and rank are to keep."""


def cell_of(text: str) -> Cell:
    """Parse BUDGET:RANK."""
    budget, rank = text.split(":")
    return Cell(int(budget), int(rank))


def engine_of(model: str, cell: Cell | None, length: int, outliers: int, chunk: int, work: Path) -> Path:
    """Return the engine of a cell, or with None that with full attention, built if it is not there yet."""
    slug = model.replace(", ", "-").replace(" ", "-")
    policy, name = "full", f"{slug}-full-{length}"
    if cell is not None:
        policy = f"shadowkv:rank={cell.rank},sparse_budget={cell.budget},num_outlier_chunks={outliers}"
        policy += f",chunk_size={chunk}"
        name = f"{slug}-{cell.budget}-{cell.rank}-{outliers}-{length}" + (f"-chunk{chunk}" if chunk != 8 else "")
    options = BuildOptions(dtype="bfloat16", max_num_seqs=16, max_seq_len=length + MAX_ANSWER_TOKENS, kv_policy=policy)
    return cached_engine(work / "engines" / name, MODELS[model], options)


def enough(rows: list[dict[str, Any]]) -> tuple[int, int] | None:
    """Return the (budget, rank) of the least budget, then rank, that keeps ``ENOUGH`` for every model; None if none."""
    models = {row["model"] for row in rows}
    kept: dict[tuple[int, int], set[str]] = {}
    for row in rows:
        if row.get("share_of_full", 0) >= ENOUGH:
            kept.setdefault((row["sparse_budget"], row["rank"]), set()).add(row["model"])
    return min((cell for cell, who in kept.items() if who == models), default=None)


def measure(args: argparse.Namespace) -> Report:
    """Ask every engine."""
    questions, results = Questions.of(args), []
    grid = [(model, cell) for model in args.model or MODELS for cell in (None, *(args.cell or CROSS))]
    with tqdm(grid, unit="engine", disable=None) as bar:
        for model, cell in bar:
            bar.set_description(f"{model}, {cell or 'full'}")
            engine = engine_of(model, cell, args.length, args.outliers, args.chunk, args.work)
            shape = {"sparse_budget": cell and cell.budget, "rank": cell and cell.rank}
            results.append({"model": model, **shape, **questions.ask(engine)})
    rows = against_full(results, ("sparse_budget", "rank"), with_texts=True)
    about = {"prompt_tokens": args.length, "num_outlier_chunks": args.outliers, "chunk_size": args.chunk}
    return about | {"enough": enough(rows), "rows": rows}


def notes(report: Report) -> str:
    """What was asked, and the least budget and rank that lose nothing."""
    first, chosen = report["rows"][0], report["enough"]
    verdict = (
        "No cell keeps 99% of full attention's right answers in every model."
        if chosen is None
        else f"The least budget and rank that keep 99% of full attention's right answers in every model: a budget of "
        f"{chosen[0]} tokens at rank {chosen[1]}."
    )
    return (
        f"Tiny models, {first['num_prompts']} prompts of {report['prompt_tokens']} tokens "
        f"({', '.join(first['tasks'])}, equally many; seed {report['seed']}), greedy, bf16, through engines built "
        f"with this budget and rank, chunks of {report['chunk_size']}, {report['num_outlier_chunks']} outlier chunks, "
        "32 local tokens. Exact match in per cent with its 95% Wilson interval; “versus full” pairs prompt by "
        "prompt: difference in points with its 95% interval (Agresti and Min 2005), prompts gained and lost, the "
        f"exact McNemar p. The keys of a token have 128 dimensions, so rank 128 is all of them.\n\n{verdict}"
    )


def columns(report: Report) -> list[tuple]:
    """Return the table's columns."""
    return [
        ("model", "model"), ("budget", lambda row: row["sparse_budget"] or "full attention"), ("rank", "rank"),
        *AGAINST_FULL, ("texts changed", "texts_changed"), *task_columns(report["rows"][0]["tasks"]),
    ]  # fmt: skip


def plot(report: Report, path: Path) -> None:
    """Exact match over the budget, left, and over the rank, right, of each model; dashed: full attention."""
    rows = report["rows"]
    sparse = [row for row in rows if row["sparse_budget"] is not None]
    sides = ("sparse_budget", "rank", "sparse budget, tokens"), ("rank", "sparse_budget", "rank of the keys")
    with panels(path, 11, 4.2, 2, sharey=True) as found:
        for axes, (x, other, label) in zip(found, sides, strict=True):
            for index, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
                for fixed in sorted({row[other] for row in sparse}):
                    line = sorted((r for r in sparse if r["model"] == model and r[other] == fixed), key=lambda r: r[x])
                    if len(line) > 1:
                        name = f"{model}, {'rank' if other == 'rank' else 'budget'} {fixed}"
                        bars(axes, [row[x] for row in line], line, fmt="o-", color=f"C{index}", label=name)
                full = next(row for row in rows if row["model"] == model and row["sparse_budget"] is None)
                axes.axhline(100 * full["accuracy"], color=f"C{index}", linestyle="--", linewidth=1)
            axes.set_xscale("log", base=2)
            axes.set(xlabel=label, ylabel="exact match, %")
        told = f"ShadowKV, tiny models at 2048 tokens, {rows[0]['num_prompts']} prompts, 95% intervals"
        found[0].figure.suptitle(told)


EXPERIMENT = Experiment(
    "perf.quality.shadowkv", __doc__,
    options=(
        asking("shadowkv-quality", 40, 2048 - MAX_ANSWER_TOKENS, "engines and answers"),
        option("--outliers", type=int, default=8, help="chunks a KV head keeps exact (default 8)"),
        option("--chunk", type=int, default=8, help="tokens of a chunk (default 8)"),
        option("--cell", action="append", type=cell_of, metavar="BUDGET:RANK", help="default: a cross of seven"),
        option("--model", action="append", choices=list(MODELS), help="default: both"),
    ),
    measure=measure, settings=("seed",), title="ShadowKV: quality over budget and rank", notes=notes, columns=columns,
    plot=plot, figure=".png",
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
