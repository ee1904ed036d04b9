"""Where a cut costs answers: students of a teacher that follows chains of up to eight links.

    python -m perf.quality.chains [--work DIR] [--steps 50] [--jobs 2] [--seeds 1 2 3]

SwiftKV (arXiv 2410.03960, Table 2) loses little up to half of the layers and much at 62.5%. The tiny teacher's upper
layers add too little for that; those of ``tiny-chains`` work out whose amount is whose. Students are distilled on the
same documents of chains, the seeds apart, and answer held-out ones: greedy, in float32, told the right text before each
answer. Everything under --work is kept: an interrupted run continues. Writes OUTPUT.json, .md and .png. The teacher's
weights are not committed: model_defs/assets/README.md says how to have them.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from kvforge.checkpoint import open_checkpoint
from kvforge.common.errors import KvforgeError
from kvforge.swiftkv import SwiftKVForCausalLM, load_model
from model_defs import load_config
from perf.gpu.machine import device_name
from perf.harness.command import Report, add_report, add_work, begin_report, make_parser, positive, run_program
from perf.harness.engines import ASSETS
from perf.quality.chains_report import markdown, plot
from perf.quality.swiftkv_students import NUM_STEPS, Subject, curve_of, make_students, student_of
from perf.quality.swiftkv_variants import TEACHER, Variant
from perf.training.config import CHAINS_DOCUMENTS, TINY_STUDENT
from perf.training.documents import TASK_NAMES, Batch, make_batch
from perf.training.tokenizer import FastEncoder

CHAINS = Subject(ASSETS / "tiny-chains", CHAINS_DOCUMENTS)
DISTILLED = tuple(Variant(f"cut {cut}", cut) for cut in (6, 5, 4, 3, 2))
"""From a quarter of the layers skipped to three quarters."""
ALL_WEIGHTS = tuple(
    dataclasses.replace(each, name=f"{each.name}, all weights", train="full")
    for each in DISTILLED
    if each.cut in (4, 2)
)
"""Here the layers below the cut can learn what those above it did, in the others they cannot."""
NUM_DOCUMENTS, AT_A_TIME = 96, 16


def held_out(num: int, subject: Subject = CHAINS) -> Batch:
    """Return documents that no student was trained on."""
    encode = FastEncoder(Tokenizer.from_file(str(subject.teacher / "tokenizer.json")))
    return make_batch("held-out", dataclasses.replace(subject.documents, sequences=num), encode)


def answers(predicted: torch.Tensor, documents: Batch) -> dict[str, list[bool]]:
    """Return by task whether each answer is right in all of its tokens; ``predicted`` [B, T] int64 are the likeliest.

    An answer is a run of targets of one task. It is what greedy generation gives behind the right text: up to the first
    token that is not the likeliest both have read the same.
    """
    found: dict[str, list[bool]] = {}
    right = predicted == documents.targets
    for tasks, row in zip(documents.task.tolist(), right.tolist(), strict=True):
        before = -1
        for task, is_right in zip(tasks, row, strict=True):
            if task >= 0:
                known = found.setdefault(TASK_NAMES[task], [])
                if task != before:
                    known.append(True)
                known[-1] &= is_right
            before = task
    return found


@torch.no_grad()
def ask(model: SwiftKVForCausalLM, documents: Batch) -> dict[str, list[bool]]:
    """Return the answers of a model to all questions of the documents."""
    predicted = [model(ids).argmax(-1) for ids in documents.input_ids.split(AT_A_TIME)]
    return answers(torch.cat(predicted), documents)


def asked(checkpoint: Path, documents: Batch) -> dict[str, list[bool]]:
    """Return the answers of a checkpoint's model."""
    opened = open_checkpoint(checkpoint)
    return ask(load_model(opened, load_config(opened.hf_config), torch.float32), documents)


def check_teacher(subject: Subject = CHAINS) -> None:
    """Raise KvforgeError where the teacher was not made."""
    if not (subject.teacher / "model.safetensors").is_file():
        raise KvforgeError(
            f"{subject.teacher} has no model.safetensors; train it with python -m perf.training.tiny chains, "
            "or restore the published one as model_defs/assets/README.md says."
        )


def main() -> int:
    """Make the students, ask them and report."""
    parser = make_parser(__doc__)
    add_work(parser, "runs/chains", "students")
    parser.add_argument("--seeds", nargs="+", type=positive, default=[1, 2, 3], help="at least two (default: 1 2 3)")
    parser.add_argument("--steps", type=positive, default=NUM_STEPS, help="of a distillation (default %(default)s)")
    parser.add_argument("--jobs", type=positive, default=2, help="students made at a time (default 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that distils (default %(default)s)")
    add_report(parser, "OUTPUT.json, .md and .png", "perf/results/chains", as_json=False)
    args = parser.parse_args()
    if len(set(args.seeds)) < 2:
        parser.error("--seeds: an interval needs at least two different seeds")

    def make() -> Report:
        check_teacher()
        rows: list[tuple[Variant, list[Variant]]] = [(TEACHER, [TEACHER])]
        for each in DISTILLED:
            untrained = dataclasses.replace(each, name=f"{each.name}, no distillation", distilled=False)
            rows += [(untrained, [untrained]), (each, [dataclasses.replace(each, seed=seed) for seed in args.seeds])]
        rows += [(each, [dataclasses.replace(each, seed=seed) for seed in args.seeds]) for each in ALL_WEIGHTS]
        students = [student for _, several in rows for student in several]
        make_students(students, args.work, args.steps, args.jobs, args.device, CHAINS)
        torch.set_num_threads(args.jobs)
        documents, results = held_out(NUM_DOCUMENTS), []
        with tqdm(rows, desc="answers", unit="row") as bar:
            for variant, several in bar:
                made = [student_of(student, args.work, args.steps, args.device, CHAINS) for student in several]
                results.append(
                    row_of(variant, several, [asked(checkpoint, documents) for checkpoint in made], args.work)
                )
        return begin_report("perf.quality.chains") | {
            "device": device_name(args.device),
            "seeds": args.seeds,
            "steps": args.steps,
            "tokens_per_step": TINY_STUDENT.distill.batch_size * TINY_STUDENT.distill.length,
            "documents": NUM_DOCUMENTS,
            "rows": results,
        }

    return run_program(args, make, markdown, markdown=True, plot=plot, figure=".png")


def row_of(variant: Variant, several: list[Variant], found: list[dict[str, list[bool]]], work: Path) -> dict[str, Any]:
    """Return a row: by task the number of answers and, by seed, how many are right; KL before and after by seed."""
    curves = [curve_of(student, work) for student in several if student.is_trained]
    return {
        "variant": variant.name,
        "cut": variant.cut,
        "train": variant.train if variant.is_trained else None,
        "prefill_reduction": variant.prefill_reduction,
        "num_answers": {task: len(values) for task, values in sorted(found[0].items())},
        "right": {task: [sum(each[task]) for each in found] for task in sorted(found[0])},
        "kl": [[curve[0][1], curve[-1][1]] for curve in curves],
    }


if __name__ == "__main__":
    sys.exit(main())
