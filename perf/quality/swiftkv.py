"""What rewiring and distillation cost in quality: SwiftKV's Tables 2 and 6 (arXiv 2410.03960) on the tiny teacher.

    python -m perf.quality.swiftkv [--work DIR] [--num-prompts 200] [--length 300] [--steps 50] [--jobs 2]

Rows and tables are those of ``perf.quality.swiftkv_variants``. Every student is rewired from the committed teacher,
distilled on the same generated documents, built in bf16 and asked the same prompts. Everything under --work is kept: an
interrupted run continues. Writes OUTPUT.json, .md and .png.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.evaluation.compare import compare_with_teacher, fidelity
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.runtime.llm import LLM
from perf.gpu.machine import device_name
from perf.harness.engines import TEACHER_DIR, cached_engine
from perf.harness.experiment import Experiment, Report, chosen, columns_table, interval, option, told
from perf.harness.plots import panels
from perf.harness.tables import markdown_table
from perf.quality.answers import Questions
from perf.quality.scores import DEVICE, accuracy, asking, bars, difference, percent, task_columns
from perf.quality.swiftkv_students import NUM_STEPS, curve_of, held_out_documents, make_students, student_of
from perf.quality.swiftkv_variants import TABLES, TEACHER, Variant, variants_of
from perf.training.config import TINY_STUDENT

NUM_DOCUMENTS = 48
MAX_SEQ_LEN = 640


def engine_of(variant: Variant, checkpoint: Path, work: Path) -> Path:
    """Return the engine of a row, built if it is not there yet."""
    options = BuildOptions(dtype="bfloat16", max_num_seqs=32, max_seq_len=MAX_SEQ_LEN)
    return cached_engine(work / "engines" / variant.slug, checkpoint, options)


def fidelity_of(engine: Path, teacher: Path, work: Path) -> dict[str, Any]:
    """Return KL and agreement with the teacher's engine over held-out documents, from ``work`` where known."""
    file = work / "fidelity" / f"{engine.name}.json"
    if not file.is_file():
        documents = held_out_documents(NUM_DOCUMENTS)
        values = fidelity(compare_with_teacher(LLM(engine), LLM(teacher), documents))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    return json.loads(file.read_text())


def check(args: argparse.Namespace) -> str | None:
    """Say what cannot be asked for."""
    longest = MAX_SEQ_LEN - MAX_ANSWER_TOKENS
    return f"--length can be at most {longest}" if args.length > longest else None


def measure(args: argparse.Namespace) -> Report:
    """Make, ask and compare."""
    variants = variants_of(args.tables)
    make_students(variants, args.work, args.steps, args.jobs, args.device)
    questions = Questions.of(args)
    teacher = engine_of(TEACHER, TEACHER_DIR, args.work)
    cells, curves = {}, {}
    with tqdm(variants, desc="engines", unit="engine") as bar:
        for variant in bar:
            bar.set_postfix_str(variant.slug)
            engine = engine_of(variant, student_of(variant, args.work, args.steps, args.device), args.work)
            cells[variant.slug] = {
                "variant": variant.name, "prefill_reduction": variant.prefill_reduction,
                "kv_reduction": variant.kv_reduction, "steps": args.steps if variant.is_trained else 0,
                "fidelity": fidelity_of(engine, teacher, args.work), "correct": questions.ask(engine)["correct"],
            }  # fmt: skip
            if variant.is_trained:
                curves[variant.slug] = curve_of(variant, args.work)
    per_step = TINY_STUDENT.distill.batch_size * TINY_STUDENT.distill.length
    about = {"prompt_tokens": args.length, "documents": NUM_DOCUMENTS, "device": device_name(args.device)}
    return about | {"tokens_per_step": per_step, "rows": summarised(cells), "curves": curves}


TITLES = {
    "reduction": "Prefill and cache reduction (as Table 2)",
    "recovery": "Distillation and what it trains (as Table 6)",
    "sharing": "Sharing across layers or within them (as a row of Appendix C)",
    "inits": "Where the new projections start",
}


def summarise(cell: dict[str, Any], teacher: dict[str, Any]) -> dict[str, Any]:
    """Return a row: exact match with its 95% Wilson interval, the difference from the teacher paired by prompt, and
    what was measured token by token."""
    return {
        **{name: cell[name] for name in ("variant", "prefill_reduction", "kv_reduction", "fidelity", "steps")},
        **accuracy(cell),
        "versus_teacher": difference(teacher, cell),
    }


def summarised(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows by the variants' slugs, the teacher's among them."""
    return {slug: summarise(cell, cells[TEACHER.slug]) for slug, cell in cells.items()}


def _table(variants: tuple[Variant, ...], rows: dict[str, dict[str, Any]]) -> str:
    columns = (
        ("variant", "name"), ("prefill −%", "prefill_reduction", ".1f", 100), ("cache −%", "kv_reduction", ".1f", 100),
        ("steps", "steps"), ("KL per token", lambda row: interval(row["fidelity"]["kl"], 4)),
        ("agreement %", lambda row: percent(row["fidelity"]["agreement"], "value", 2)), ("exact match %", percent),
        ("vs no cut", lambda row: percent(row["versus_teacher"], "difference", sign="+")),
        *task_columns(rows[TEACHER.slug]["tasks"]),
    )  # fmt: skip
    return columns_table(columns, [rows[v.slug] | {"name": v.name} for v in variants if v.slug in rows])


def reached(curve: list[tuple[int, float]], target: float) -> int | None:
    """Return the first step at which the held-out KL is at most ``target``; None where it never is."""
    return next((step for step, value in curve if value <= target), None)


def _steps_table(curves: dict[str, list[tuple[int, float]]]) -> str:
    """Return, per model and init, the held-out KL before and after, and the step that reached ``mean``'s last KL."""
    lines = []
    for variant in TABLES["inits"]:
        if variant.slug not in curves or not variant.distilled:
            continue
        mean = next(v for v in TABLES["inits"] if v.distilled and v.init == "mean" and v.cut == variant.cut)
        if mean.slug not in curves:
            continue
        curve, step = curves[variant.slug], reached(curves[variant.slug], curves[mean.slug][-1][1])
        shown = "not reached" if step is None else str(step)
        base = f"cut {variant.cut}, {variant.group_size}-way"
        lines.append([base, variant.init, f"{curve[0][1]:.4f}", f"{curve[-1][1]:.4f}", shown])
    head = ["model", "init", "KL at step 0", "KL at the end", "first step at or below the last KL of mean"]
    return markdown_table(head, lines)


def markdown(report: dict[str, Any]) -> str:
    """Return the tables with their explanation."""
    rows, teacher = report["rows"], report["rows"][TEACHER.slug]
    parts = [
        "# What rewiring and distillation cost in quality",
        told(report),
        f"The tiny teacher and its students in bf16 engines. Exact match: {teacher['num_prompts']} prompts of "
        f"{report['prompt_tokens']} tokens ({', '.join(teacher['tasks'])}, equally many), greedy, with the 95% Wilson "
        "interval; “vs no cut” is the difference in points paired by prompt (Agresti and Min 2005). KL(teacher ‖ "
        "student) in nats and agreement of the likeliest token are means over all tokens of "
        f"{report['documents']} held-out documents, with 95% bootstrap intervals over documents. A distillation is "
        f"{report['steps']} steps of {report['tokens_per_step']} tokens on {report['device']}, one seed; 0 steps is "
        "none.",
    ]
    whole = [name for name, variants in TABLES.items() if all(variant.slug in rows for variant in variants)]
    for name in whole:
        parts += [f"## {TITLES[name]}", _table(TABLES[name], rows)]
    if "inits" in whole:
        parts += ["## Steps to the same KL", _steps_table(report["curves"])]
    return "\n\n".join(parts) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Left: exact match of the reduction table. Middle: KL of every table's rows. Right: held-out KL over steps."""
    rows, curves = report["rows"], report["curves"]
    with panels(path, 16, 5.2, 3) as axes:
        shown = [variant for variant in TABLES["reduction"] + TABLES["recovery"] if variant.slug in rows]
        names = [variant.name for variant in shown]
        chosen = [rows[variant.slug] for variant in shown]
        _bars(axes[0], names, chosen, "accuracy", 100)
        _bars(axes[1], names, [row["fidelity"]["kl"] for row in chosen], "value", 1)
        axes[0].set(xlabel="exact match, %")
        axes[1].set_xscale("symlog", linthresh=1e-3)
        axes[1].set(xlabel="KL(teacher ‖ student) per token, nats", xlim=(0, None))
        axes[1].set_yticklabels([])
        colours = {"copy": "tab:gray", "mean": "tab:orange", "fold": "tab:green", "ridge": "tab:blue"}
        for variant in TABLES["inits"]:
            if variant.distilled and variant.slug in curves:
                steps, values = zip(*curves[variant.slug], strict=True)
                style = "-" if variant.cut == 4 else "--"
                label = f"cut {variant.cut}, {variant.group_size}-way, {variant.init}"
                axes[2].plot(steps, values, style, color=colours[variant.init], label=label)
        axes[2].set(xlabel="distillation steps", ylabel="held-out KL per token, nats", yscale="log")


def _bars(axes: Any, names: list[str], rows: list[dict[str, Any]], name: str, factor: float) -> None:
    bars(axes, range(len(names)), rows, name, across=True, factor=factor)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


EXPERIMENT = Experiment(
    "perf.quality.swiftkv", __doc__,
    options=(
        asking("swiftkv-quality", 200, 300, "students, engines and answers"),
        option("--steps", type=int, default=NUM_STEPS, help="of a distillation (default %(default)s)"),
        chosen("--tables", list(TABLES), "default: all"),
        option("--jobs", type=int, default=2, help="students made at a time (default 2)"), DEVICE,
    ),
    measure=measure, settings=("seed", "steps"), check=check, shown=markdown, plot=plot, figure=".png",
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
