"""Ablations of distillation with several seeds: what is shared, what is trained, and on what documents.

    python -m perf.quality.ablations [--work DIR] [--steps 50] [--jobs 2] [--ablation sharing] [--seeds 1 2 3]

The appendices of SwiftKV (arXiv 2410.03960) on the tiny teacher. Every student starts from the paper's init and is
measured every ten steps by KL(teacher || student) over held-out documents of all tasks, in float32. The students of one
seed see the same batches, so differences are taken seed by seed. Everything under --work is kept: an interrupted run
continues. Writes OUTPUT.json, .md and .png.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from perf.gpu.machine import device_name
from perf.harness.experiment import Experiment, Report, chosen, columns_table, number, output, told, work
from perf.harness.plots import panels
from perf.quality.scores import DEVICE, TRAINED, interval_of_mean, too_few_seeds
from perf.quality.swiftkv import reached
from perf.quality.swiftkv_students import CURVE_DOCUMENTS, NUM_STEPS, curve_of, make_students
from perf.quality.swiftkv_variants import ACROSS, HALF, SHARING, Variant
from perf.training.config import TINY_STUDENT


@dataclass(frozen=True)
class Ablation:
    """Students that differ in one thing, the first of them what the others are compared with."""

    title: str
    variants: tuple[Variant, ...]


def trained(base: Variant) -> tuple[Variant, Variant]:
    """Return a student that trains SwiftKV's weights, and one that trains all."""
    own, every = f"{base.name}, SwiftKV's weights", f"{base.name}, all weights"
    return replace(base, name=own), replace(base, name=every, train="full")


ABLATIONS = {
    "sharing": Ablation("Sharing across layers or within them, cache −25% (Appendix C)", SHARING),
    "training": Ablation("What is trained: SwiftKV's weights or all", trained(HALF)),
    "training4": Ablation("The same with 4-way AcrossKV", trained(ACROSS)),
    "data": Ablation(
        "What it is distilled on, 4-way AcrossKV (Appendix D)",
        (
            replace(ACROSS, name="documents of all tasks"),
            replace(ACROSS, name="of two tasks that look up a key", recipe="keys"),
            replace(ACROSS, name="of arithmetic, which looks up nothing", recipe="arithmetic"),
        ),
    ),
}


def seeded(ablation: Ablation, seeds: list[int]) -> list[list[Variant]]:
    """Return the students of each variant, one per seed."""
    return [[replace(variant, seed=seed) for seed in seeds] for variant in ablation.variants]


def measure(args: argparse.Namespace) -> Report:
    """Make the students and read their curves."""
    rows = {name: seeded(ABLATIONS[name], args.seeds) for name in args.ablation}
    wanted = {student.slug: student for table in rows.values() for students in table for student in students}
    make_students(list(wanted.values()), args.work, args.steps, args.jobs, args.device)
    curves = {
        name: {students[0].name: [curve_of(student, args.work) for student in students] for students in table}
        for name, table in rows.items()
    }
    return {
        "device": device_name(args.device),
        "documents": CURVE_DOCUMENTS,
        "tokens_per_step": TINY_STUDENT.distill.batch_size * TINY_STUDENT.distill.length,
        "tables": [{"title": ABLATIONS[name].title, "rows": compared(found)} for name, found in curves.items()],
    }


Curve = Sequence[Sequence[float]]
"""(step, held-out KL in nats per token) of one student."""
RECOVERED = 0.1
"""A student has recovered where its KL is this part of what it was before distillation."""


def compared(curves: Mapping[str, Sequence[Curve]]) -> list[dict[str, Any]]:
    """Return a row for each variant of an ablation: its last KL by seed, the difference from the first variant's taken
    seed by seed with its interval, and the steps in which each seed recovered."""
    base = [curve[-1][1] for curve in next(iter(curves.values()))]
    rows: list[dict[str, Any]] = []
    for name, found in curves.items():
        last = [curve[-1][1] for curve in found]
        apart = [value - other for value, other in zip(last, base, strict=True)]
        rows.append({
            "variant": name, "before": found[0][0][1], "last": last,
            "difference": interval_of_mean(apart) if rows else None,
            "recovered": [reached(curve, RECOVERED * curve[0][1]) for curve in found], "curves": found,
        })  # fmt: skip
    return rows


def markdown(report: dict[str, Any]) -> str:
    """Return the tables with their explanation."""
    per_step = report["tokens_per_step"]

    def difference(row: dict[str, Any]) -> str:
        return "{:+.4f} ({:+.4f} to {:+.4f})".format(*row["difference"]) if row["difference"] else ""

    def recovered(row: dict[str, Any]) -> str:
        return ", ".join(f"{step * per_step:,}" if step is not None else "not" for step in row["recovered"])

    columns = (
        ("variant", "variant"), ("KL before", "before", ".4f"), ("after, mean", lambda row: mean(row["last"]), ".4f"),
        ("by seed", lambda row: ", ".join(f"{value:.4f}" for value in row["last"])),
        ("minus the first row", difference), ("tokens until recovered", recovered),
    )  # fmt: skip
    parts = [
        "# Ablations of distillation",
        told(report),
        "Students of the tiny teacher, from the paper's init. KL(teacher ‖ student) in nats per token over "
        f"{report['documents']} held-out documents of all tasks, in float32, before and after {report['steps']} steps "
        f"of {per_step} tokens, with seeds {', '.join(map(str, report['seeds']))}. Differences are from the first "
        "row, seed by seed, with the 95% interval of Student's t. The last column has the tokens after which a "
        f"seed's KL was at most {RECOVERED:.0%} of what it was before.",
    ]
    for table in report["tables"]:
        parts += [f"## {table['title']}", columns_table(columns, table["rows"])]
    return "\n\n".join(parts) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Held-out KL over tokens of distillation: a panel for each ablation, a line for each seed."""
    tables = report["tables"]
    with panels(path, 5.2 * len(tables), 4.6, len(tables), legend=7, which="both") as found:
        for panel, table in zip(found, tables, strict=True):
            for i, row in enumerate(table["rows"]):
                for seed, curve in enumerate(row["curves"]):
                    tokens = [step * report["tokens_per_step"] for step, _ in curve]
                    label = row["variant"] if seed == 0 else None
                    panel.plot(tokens, [value for _, value in curve], color=f"C{i}", lw=1, label=label)
            panel.set(yscale="log", xlabel="tokens", ylabel="held-out KL per token, nats")
            panel.set_title(table["title"], fontsize=9)


EXPERIMENT = Experiment(
    "perf.quality.ablations", __doc__,
    options=(
        work("runs/ablations", "students"), chosen("--ablation", list(ABLATIONS), "default: all"), *TRAINED,
        number("--steps", NUM_STEPS, "of a distillation (default %(default)s)"), DEVICE,
        output("OUTPUT.json, .md and .png", "perf/results/ablations", as_json=False),
    ),
    measure=measure, settings=("seeds", "steps"), check=too_few_seeds, shown=markdown, plot=plot, figure=".png",
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
