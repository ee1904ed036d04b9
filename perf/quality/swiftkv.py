"""What rewiring and distillation cost in quality: SwiftKV's Tables 2 and 6 (arXiv 2410.03960) on the tiny teacher.

    python -m perf.quality.swiftkv [--work DIR] [--num-prompts 200] [--length 300] [--steps 150] [--jobs 2]

Rows and tables are those of ``perf.quality.swiftkv_variants``. Every student is rewired from the committed teacher,
distilled on the same generated documents, built in bf16 and asked the same prompts. Everything under --work is kept: an
interrupted run continues. Writes OUTPUT.json, .md and .png.
"""

import argparse
import json
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.compiler import BuildOptions, build_engine
from kvforge.engine import MANIFEST_FILE
from kvforge.evaluation.compare import compare_with_teacher, fidelity
from kvforge.evaluation.score import MAX_ANSWER_TOKENS, is_correct
from kvforge.runtime import LLM
from kvforge.training.config import TINY_STUDENT
from perf.quality.answers import answer, examples_of
from perf.quality.swiftkv_report import write_report
from perf.quality.swiftkv_students import TEACHER_DIR, curve_of, held_out_documents, rewired_of, student_of
from perf.quality.swiftkv_variants import TEACHER, Variant, all_variants

TASKS = ("needle_single", "needle_multi", "variables", "list_recall", "amounts")
NUM_DOCUMENTS = 48
MAX_SEQ_LEN = 640


def engine_of(variant: Variant, checkpoint: Path, work: Path) -> Path:
    """Return the engine of a row, built if it is not there yet."""
    engine = work / "engines" / variant.slug
    if not (engine / MANIFEST_FILE).is_file():
        build_engine(checkpoint, engine, BuildOptions(dtype="bfloat16", max_num_seqs=32, max_seq_len=MAX_SEQ_LEN))
    return engine


def fidelity_of(engine: Path, teacher: Path, work: Path) -> dict[str, Any]:
    """Return KL and agreement with the teacher's engine over held-out documents, from ``work`` where known."""
    file = work / "fidelity" / f"{engine.name}.json"
    if not file.is_file():
        documents = held_out_documents(NUM_DOCUMENTS)
        values = fidelity(compare_with_teacher(LLM(engine), LLM(teacher), documents))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    return json.loads(file.read_text())


def make_students(variants: list[Variant], work: Path, steps: int, jobs: int) -> None:
    """Rewire and distil every row, ``jobs`` at a time, each on one thread."""
    for variant in variants:
        rewired_of(variant, work)
    with (
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool,
        tqdm(total=len(variants), desc="students", unit="model") as bar,
    ):
        for future in [pool.submit(student_of, variant, work, steps) for variant in variants]:
            future.result()
            bar.update()


def main() -> None:
    """Make, ask, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/swiftkv-quality"), help="students, engines and answers")
    parser.add_argument("--num-prompts", type=int, default=200, help="of each of the five tasks (default 200)")
    parser.add_argument("--length", type=int, default=300, help="prompt length in tokens (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default 1)")
    parser.add_argument(
        "--steps", type=int, default=TINY_STUDENT.distill.max_steps, help="of a distillation (default %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="students made at a time (default 2)")
    parser.add_argument(
        "--output", type=Path, default=Path("perf/results/swiftkv-quality"), help="without suffix (default %(default)s)"
    )
    args = parser.parse_args()
    if args.length + MAX_ANSWER_TOKENS > MAX_SEQ_LEN:
        parser.error(f"--length can be at most {MAX_SEQ_LEN - MAX_ANSWER_TOKENS}")
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch.export's own
    variants = all_variants()
    make_students(variants, args.work, args.steps, args.jobs)
    examples = examples_of(TASKS, TEACHER_DIR / "tokenizer.json", args.length, args.num_prompts, args.seed)
    teacher = engine_of(TEACHER, TEACHER_DIR, args.work)
    cells, curves = {}, {}
    with tqdm(variants, desc="engines", unit="engine") as bar:
        for variant in bar:
            bar.set_postfix_str(variant.slug)
            engine = engine_of(variant, student_of(variant, args.work, args.steps), args.work)
            texts = answer(engine, examples, args.length, args.seed, args.work)
            cells[variant.slug] = {
                "variant": variant.name,
                "prefill_reduction": variant.prefill_reduction,
                "kv_reduction": variant.kv_reduction,
                "steps": args.steps if variant.is_trained else 0,
                "fidelity": fidelity_of(engine, teacher, args.work),
                "correct": {
                    task: [is_correct(example, text) for example, text in zip(wanted, texts[task], strict=True)]
                    for task, wanted in examples.items()
                },
            }
            if variant.is_trained:
                curves[variant.slug] = curve_of(variant, args.work)
    settings = {
        "prompt_tokens": args.length,
        "seed": args.seed,
        "documents": NUM_DOCUMENTS,
        "steps": args.steps,
        "tokens_per_step": TINY_STUDENT.distill.batch_size * TINY_STUDENT.distill.length,
    }
    write_report(cells, curves, settings, args.output)
    print(args.output.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
