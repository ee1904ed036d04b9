"""Where a cut costs answers: students of a teacher that follows chains of up to eight links.

    python -m perf.quality.chains [--work DIR] [--steps 50] [--jobs 2] [--seeds 1 2 3]

SwiftKV (arXiv 2410.03960, Table 2) loses little up to half of the layers and much at 62.5%. The tiny teacher's upper
layers add too little for that; those of ``tiny-chains`` work out whose amount is whose. Students are distilled on the
same documents of chains, the seeds apart, and answer held-out ones: greedy, in float32, told the right text before each
answer. Everything under --work is kept: an interrupted run continues. Writes OUTPUT.json, .md and .png. The teacher's
weights are not committed: model_defs/assets/README.md says how to have them.
"""

import argparse
import dataclasses
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from kvforge.checkpoint import open_checkpoint
from kvforge.common.errors import KvforgeError
from kvforge.swiftkv import SwiftKVForCausalLM, load_model
from kvforge.tasks.chains import HOPS
from model_defs import load_config
from perf.gpu.machine import device_name
from perf.harness.engines import ASSETS
from perf.harness.experiment import Experiment, Report, number, output, work
from perf.harness.plots import panels
from perf.quality.scores import DEVICE, TRAINED, interval_of_mean, too_few_seeds
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


def measure(args: argparse.Namespace) -> Report:
    """Make the students and ask them."""
    check_teacher()
    rows: list[tuple[Variant, list[Variant]]] = [(TEACHER, [TEACHER])]
    for each in (*DISTILLED, *ALL_WEIGHTS):
        untrained = dataclasses.replace(each, name=f"{each.name}, no distillation", distilled=False)
        rows += [(untrained, [untrained])] if each in DISTILLED else []
        rows.append((each, [dataclasses.replace(each, seed=seed) for seed in args.seeds]))
    students = [student for _, several in rows for student in several]
    make_students(students, args.work, args.steps, args.jobs, args.device, CHAINS)
    torch.set_num_threads(args.jobs)
    documents, results = held_out(NUM_DOCUMENTS), []
    for variant, several in tqdm(rows, desc="answers", unit="row"):
        made = [student_of(student, args.work, args.steps, args.device, CHAINS) for student in several]
        found = [asked(checkpoint, documents) for checkpoint in made]
        results.append(row_of(variant, several, found, args.work))
    per_step = TINY_STUDENT.distill.batch_size * TINY_STUDENT.distill.length
    about = {"device": device_name(args.device), "tokens_per_step": per_step, "documents": NUM_DOCUMENTS}
    return about | {"rows": results}


GROUPS = {"told": (0,), "1–2 links": (1, 2), "3–5 links": (3, 4, 5), "6–8 links": (6, 7, 8), "all": HOPS}
"""Columns: answers that stand in the text, and those that so many links lie before."""


def shares(row: dict[str, Any], hops: tuple[int, ...]) -> list[float]:
    """Return by seed the share of right answers among those so many links away."""
    tasks = [f"chain_{each}" for each in hops if f"chain_{each}" in row["num_answers"]]
    num = sum(row["num_answers"][task] for task in tasks)
    return [sum(right) / num for right in zip(*(row["right"][task] for task in tasks), strict=True)]


def share(values: list[float]) -> str:
    """Return a share of each seed for a reader: of several the mean and its interval."""
    if len(values) == 1:
        return f"{100 * values[0]:.1f}"
    middle, low, high = (100 * value for value in interval_of_mean(values))
    return f"{middle:.1f} ({max(low, 0):.1f} to {min(high, 100):.1f})"


def _kl(row: dict[str, Any]) -> str:
    before, after = ([pair[place] for pair in row["kl"]] for place in (0, 1))
    return f"{mean(before):.3f} to {mean(after):.4f}" if row["kl"] else ""


COLUMNS = (
    ("variant", "variant"), ("prefill −%", "prefill_reduction", ".1f", 100), ("KL", _kl),
    *((name, lambda row, hops=hops: share(shares(row, hops))) for name, hops in GROUPS.items()),
)  # fmt: skip


def notes(report: dict[str, Any]) -> str:
    """What was asked, and how often."""
    answers = report["rows"][0]["num_answers"]
    counts = ", ".join(f"{sum(answers[f'chain_{hop}'] for hop in hops)} {name}" for name, hops in GROUPS.items())
    return (
        f"Students of `tiny-chains` from the paper's init, distilled with seeds {', '.join(map(str, report['seeds']))} "
        f"for {report['steps']} steps of {report['tokens_per_step']} tokens: answers that are right, in per cent, by "
        f"how many links lie between the name asked for and the amount ({counts}; {report['documents']} held-out "
        "documents, greedy, float32). With several seeds the mean with the 95% interval of Student's t. KL(teacher ‖ "
        "student) in nats per token before and after distillation, mean of the seeds."
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw right answers over the share of layers skipped, a panel each for students before and after distillation."""
    teacher, *rows = report["rows"]
    titles = (("before distillation", None), ("distilled, SwiftKV's weights", "partial"))
    with panels(path, 11, 4.2, 2, legend=0, sharey=True) as found:
        for axes, (title, train) in zip(found, titles, strict=True):
            chosen = [teacher, *(row for row in rows if row["train"] == train)]
            skipped = [100 * row["prefill_reduction"] for row in chosen]
            for name, hops in list(GROUPS.items())[:-1]:
                values = [shares(row, hops) for row in chosen]
                middle = [100 * mean(value) for value in values]
                spread = [[100 * abs(mean(v) - edge(v)) for v in values] for edge in (min, max)]
                axes.errorbar(skipped, middle, spread, fmt="o-", capsize=3, label=name)
            axes.set(title=title, xlabel="layers that prompt tokens skip, %")
        found[0].set_ylabel("right answers, % (bars: lowest and highest seed)")
        found[0].legend()


EXPERIMENT = Experiment(
    "perf.quality.chains", __doc__,
    options=(
        work("runs/chains", "students"), *TRAINED,
        number("--steps", NUM_STEPS, "of a distillation (default %(default)s)"), DEVICE,
        output("OUTPUT.json, .md and .png", "perf/results/chains", as_json=False),
    ),
    measure=measure, settings=("seeds", "steps"), check=too_few_seeds, title="Cuts of a teacher that follows chains",
    notes=notes, columns=COLUMNS, plot=plot, figure=".png",
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
