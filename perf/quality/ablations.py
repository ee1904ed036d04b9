"""Ablations of distillation with several seeds: what is shared, what is trained, and on what documents.

    python -m perf.quality.ablations [--work DIR] [--steps 50] [--jobs 2] [--ablation sharing] [--seeds 1 2 3]

The appendices of SwiftKV (arXiv 2410.03960) on the tiny teacher. Every student starts from the paper's init and is
measured every ten steps by KL(teacher || student) over held-out documents of all tasks, in float32. The students of one
seed see the same batches, so differences are taken seed by seed. Everything under --work is kept: an interrupted run
continues. Writes OUTPUT.json, .md and .png.
"""

import sys
from dataclasses import dataclass, replace

from perf.gpu.machine import device_name
from perf.harness.command import Report, add_report, add_work, begin_report, make_parser, positive, run_program
from perf.quality.ablations_report import compared, markdown, plot
from perf.quality.swiftkv_students import CURVE_DOCUMENTS, NUM_STEPS, curve_of, make_students
from perf.quality.swiftkv_variants import ACROSS, HALF, SHARING, Variant
from perf.training.config import TINY_STUDENT


@dataclass(frozen=True)
class Ablation:
    """Students that differ in one thing, the first of them what the others are compared with."""

    title: str
    variants: tuple[Variant, ...]


ABLATIONS = {
    "sharing": Ablation("Sharing across layers or within them, cache −25% (Appendix C)", SHARING),
    "training": Ablation(
        "What is trained: SwiftKV's weights or all",
        (
            replace(HALF, name="cut 4, SwiftKV's weights"),
            replace(HALF, name="cut 4, all weights", train="full"),
        ),
    ),
    "training4": Ablation(
        "The same with 4-way AcrossKV",
        (
            replace(ACROSS, name="cut 4, 4-way, SwiftKV's weights"),
            replace(ACROSS, name="cut 4, 4-way, all weights", train="full"),
        ),
    ),
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


def main() -> int:
    """Make the students, read their curves and report."""
    parser = make_parser(__doc__)
    add_work(parser, "runs/ablations", "students")
    parser.add_argument("--ablation", nargs="+", choices=list(ABLATIONS), default=list(ABLATIONS), help="default: all")
    parser.add_argument("--seeds", nargs="+", type=positive, default=[1, 2, 3], help="at least two (default: 1 2 3)")
    parser.add_argument("--steps", type=positive, default=NUM_STEPS, help="of a distillation (default %(default)s)")
    parser.add_argument("--jobs", type=positive, default=2, help="students made at a time (default 2)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of the students (default %(default)s)"
    )
    add_report(parser, "OUTPUT.json, .md and .png", "perf/results/ablations", as_json=False)
    args = parser.parse_args()
    if len(set(args.seeds)) < 2:
        parser.error("--seeds: an interval needs at least two different seeds")
    rows = {name: seeded(ABLATIONS[name], args.seeds) for name in args.ablation}
    wanted = {student.slug: student for table in rows.values() for students in table for student in students}

    def make() -> Report:
        make_students(list(wanted.values()), args.work, args.steps, args.jobs, args.device)
        tables = [
            {
                "title": ABLATIONS[name].title,
                "rows": compared(
                    {students[0].name: [curve_of(student, args.work) for student in students] for students in table}
                ),
            }
            for name, table in rows.items()
        ]
        return begin_report("perf.quality.ablations") | {
            "device": device_name(args.device),
            "seeds": args.seeds,
            "steps": args.steps,
            "documents": CURVE_DOCUMENTS,
            "tokens_per_step": TINY_STUDENT.distill.batch_size * TINY_STUDENT.distill.length,
            "tables": tables,
        }

    return run_program(args, make, markdown, markdown=True, plot=plot, figure=".png")


if __name__ == "__main__":
    sys.exit(main())
