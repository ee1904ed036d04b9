"""Ablations of distillation with several seeds: what is shared, what is trained, and on what documents.

    python -m perf.quality.ablations [--work DIR] [--steps 50] [--jobs 2] [--ablation sharing] [--seeds 1 2 3]

The appendices of SwiftKV (arXiv 2410.03960) on the tiny teacher. Every student starts from the paper's init and is
measured every ten steps by KL(teacher || student) over held-out documents of all tasks, in float32. The students of one
seed see the same batches, so differences are taken seed by seed. Everything under --work is kept: an interrupted run
continues. Writes OUTPUT.json, .md and .png.
"""

import argparse
from dataclasses import dataclass, replace

from perf.gpu.machine import device_name
from perf.harness.experiment import Experiment, Report, chosen, number, output, work
from perf.quality.ablations_report import compared, markdown, plot
from perf.quality.scores import DEVICE, TRAINED, too_few_seeds
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
