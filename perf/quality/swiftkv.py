"""What rewiring and distillation cost in quality: SwiftKV's Tables 2 and 6 (arXiv 2410.03960) on the tiny teacher.

    python -m perf.quality.swiftkv [--work DIR] [--num-prompts 200] [--length 300] [--steps 50] [--jobs 2]

Rows and tables are those of ``perf.quality.swiftkv_variants``. Every student is rewired from the committed teacher,
distilled on the same generated documents, built in bf16 and asked the same prompts. Everything under --work is kept: an
interrupted run continues. Writes OUTPUT.json, .md and .png.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.evaluation.compare import compare_with_teacher, fidelity
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.runtime.llm import LLM
from perf.gpu.machine import device_name
from perf.harness.command import run_main
from perf.harness.engines import TEACHER_DIR, cached_engine
from perf.quality.answers import Questions
from perf.quality.scores import quality_parser
from perf.quality.swiftkv_report import write_report
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


def main() -> None:
    """Make, ask, measure and report."""
    parser = quality_parser(
        __doc__, "swiftkv-quality", 200, 300, "students, engines and answers", "OUTPUT.json, .md and .png"
    )
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of a distillation (default %(default)s)")
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES), help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="students made at a time (default 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that distils (default %(default)s)")
    args = parser.parse_args()
    if args.length + MAX_ANSWER_TOKENS > MAX_SEQ_LEN:
        parser.error(f"--length can be at most {MAX_SEQ_LEN - MAX_ANSWER_TOKENS}")
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
                "variant": variant.name,
                "prefill_reduction": variant.prefill_reduction,
                "kv_reduction": variant.kv_reduction,
                "steps": args.steps if variant.is_trained else 0,
                "fidelity": fidelity_of(engine, teacher, args.work),
                "correct": questions.ask(engine)["correct"],
            }
            if variant.is_trained:
                curves[variant.slug] = curve_of(variant, args.work)
    settings = {
        "prompt_tokens": args.length,
        "seed": args.seed,
        "documents": NUM_DOCUMENTS,
        "device": device_name(args.device),
        "steps": args.steps,
        "tokens_per_step": TINY_STUDENT.distill.batch_size * TINY_STUDENT.distill.length,
    }
    write_report(cells, curves, settings, args.output)
    print(args.output.with_suffix(".md").read_text())


if __name__ == "__main__":
    sys.exit(run_main(main))
