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
from perf.harness.experiment import Experiment, Report, chosen, option
from perf.quality.answers import Questions
from perf.quality.scores import DEVICE, asking
from perf.quality.swiftkv_report import markdown, plot, summarised
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
