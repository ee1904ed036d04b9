"""Where a blind cut costs answers: a teacher that follows chains, cut blindly and with a single input, before and after
distillation on the same tokens.

    python -m perf.quality.blind_chains [--teacher DIR] [--work DIR] [--cut 6 4] [--steps 60] [--seeds 1 2]

Chains are worked out layer by layer as a prompt is read, and above a blind cut no prompt is read but its anchors.
Documents, questions and answers are those of ``perf.quality.chains``: told the right text before each answer, greedy,
float32; above a blind cut an answer sees anchors and itself. Both kinds train all weights above the cut (``kvforge
distill --mask answers --train upper``). Writes OUTPUT.json and .md.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvforge.checkpoint import open_checkpoint
from kvforge.distill import distill_checkpoint
from kvforge.distill.config import DistillConfig
from kvforge.distill.packing import DataSettings
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.swiftkv import load_model
from kvforge.swiftkv.token_layout import make_layout
from model_defs import load_config
from perf.harness.experiment import Experiment, Report, Row, number, numbers, output, place, work
from perf.quality.chains import AT_A_TIME, CHAINS, GROUPS, NUM_DOCUMENTS, answers, held_out, share, shares
from perf.quality.swiftkv_students import Subject
from perf.training.documents import Batch, make_document
from perf.training.tokenizer import FastEncoder

LENGTH, BATCH, ANCHORS = 512, 4, 32


@dataclass(frozen=True)
class Kind:
    """A cut of the teacher."""

    name: str
    cut: int
    num_anchors: int | None = None

    @property
    def options(self) -> RewireOptions:
        """How it is made."""
        return RewireOptions(self.cut, num_anchors=self.num_anchors)


def kinds(cuts: Sequence[int]) -> list[Kind]:
    """Return both kinds of every cut."""
    both = (("single input", None), ("blind", ANCHORS))
    return [Kind(f"cut {cut}, {name}", cut, anchors) for cut in cuts for name, anchors in both]


@torch.no_grad()
def asked(checkpoint: Path, documents: Batch) -> dict[str, list[bool]]:
    """Return the answers of a checkpoint's model, by task."""
    opened = open_checkpoint(checkpoint)
    sizes = load_config(opened.hf_config)
    model, predicted = load_model(opened, sizes, torch.float32), list[torch.Tensor]()
    parts = (each.split(AT_A_TIME) for each in (documents.input_ids, documents.task))
    for ids, task in zip(*parts, strict=True):
        layout = make_layout(sizes, ids.shape[1], answers=task >= 0 if sizes.is_blind else None)
        predicted.append(model(ids, layout).argmax(-1))
    return answers(torch.cat(predicted), documents)


def write_rows(path: Path, subject: Subject) -> Path:
    """Write the documents, whose answers' tokens alone have a weight."""
    encode, stage = FastEncoder(Tokenizer.from_file(str(subject.teacher / "tokenizer.json"))), subject.documents
    with path.open("w", encoding="utf-8") as file:
        for index in range(stage.sequences):
            made = make_document(random.Random(f"blind/{index}"), stage.length, encode, stage)
            row = {"input_ids": made.ids, "weights": [float(task >= 0) for task in made.task]}
            file.write(json.dumps(row) + "\n")
    return path


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for the teacher and for each kind before and after distillation, with right answers by seed."""
    subject = Subject(args.teacher, CHAINS.documents)
    documents = held_out(NUM_DOCUMENTS, subject)

    def row(variant: str, checkpoints: list[Path]) -> Row:
        found = [asked(each, documents) for each in checkpoints]
        right = {task: [sum(each[task]) for each in found] for task in sorted(found[0])}
        return {"variant": variant, "num_answers": {task: len(found[0][task]) for task in right}, "right": right}

    args.work.mkdir(parents=True, exist_ok=True)
    data = write_rows(args.work / "rows.jsonl", subject)
    yield row("no cut", [args.teacher])
    for kind in kinds(args.cut):
        rewired, students = args.work / kind.name.replace(", ", "-").replace(" ", "-"), list[Path]()
        rewire_checkpoint(args.teacher, rewired, kind.options, overwrite=True)
        yield row(f"{kind.name}, no distillation", [rewired])
        for seed in args.seeds:
            config = DistillConfig(
                "upper", max_steps=args.steps, length=LENGTH, batch_size=BATCH, micro_batch=BATCH, lr=1e-3, seed=seed,
                dtype="float32", device="cpu",
            )  # fmt: skip
            students.append(rewired.with_name(f"{rewired.name}-{seed}"))
            run = rewired.with_name(f"{rewired.name}-{seed}-run")
            distill_checkpoint(
                rewired, students[-1], data, config, DataSettings(LENGTH, "answers"), work=run, overwrite=True,
                progress=False,
            )  # fmt: skip
        yield row(f"{kind.name}, distilled", students)


def measure(args: argparse.Namespace) -> Report:
    """Make the students and ask them."""
    return {"tokens_per_step": LENGTH * BATCH, "documents": NUM_DOCUMENTS, "rows": list(rows_of(args))}


EXPERIMENT = Experiment(
    "perf.quality.blind_chains", __doc__,
    options=(
        place("--teacher", "a checkpoint (default: tiny-chains, which is not committed)", default=CHAINS.teacher),
        work("runs/blind-chains", "students"), numbers("--cut", [6, 4]), numbers("--seeds", [1, 2]),
        number("--steps", 60, "of a distillation (default %(default)s)"), output("OUTPUT.json and .md"),
    ),
    measure=measure, settings=("seeds", "steps"), title="A blind cut of a teacher that follows chains", is_dated=True,
    notes="Right answers in per cent, by how many links lie between the name asked for and the amount; {documents} "
    "held-out documents. Distilled for {steps} steps of {tokens_per_step} tokens, answers alone counting, all weights "
    "above the cut, with seeds {seeds}; of several the mean with the 95% interval of Student's t.",
    columns=(
        ("variant", "variant"),
        *((name, lambda row, hops=hops: share(shares(row, hops))) for name, hops in GROUPS.items()),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
