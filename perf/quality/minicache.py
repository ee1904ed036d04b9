"""MiniCache's merge of neighbouring layers' caches (arXiv 2405.14366) beside AcrossKV, whose layers share one.

    python -m perf.quality.minicache [--work DIR] [--num-prompts 20] [--length 300] [--steps 10] [--minutes M]

The tiny teacher with the caches of its upper half merged in pairs, and its students of cut 4 with pairs that share one:
by every init of ``kvforge rewire`` without distillation, and distilled from three seeds each. All in plain torch and
float32. KL and agreement are those of tokens decoded one by one after a prompt; of distilled students, KL over steps.
Everything under --work is kept: an interrupted run continues. Writes OUTPUT.json and .md.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from kvforge.common.errors import KvforgeError
from kvforge.evaluation.bootstrap import bootstrap_interval
from kvforge.evaluation.score import MAX_ANSWER_TOKENS, STOP
from kvforge.tokenization.files import tokens_before_text
from perf.harness.engines import TEACHER_DIR
from perf.harness.experiment import Experiment, Report, option
from perf.quality.answers import Questions
from perf.quality.cached_model import MergedPairs, answers, divergence
from perf.quality.minicache_report import markdown, summarise
from perf.quality.minicache_rows import ROWS, Row, bytes_per_token
from perf.quality.scores import Cell, asking, correct_of
from perf.quality.swiftkv_students import CURVE_DOCUMENTS, curve_of, held_out_documents, student_of
from perf.quality.swiftkv_variants import Variant
from perf.training.config import EOS_ID, TINY_STUDENT

NUM_DOCUMENTS, NUM_PROMPT = 32, 256
"""Documents that are scored, and the tokens of each that are its prompt."""
QUANTILES = (0.05, 0.5, 0.95)


def documents() -> torch.Tensor:
    """Return held-out documents ``[D, T]``, cut to the length of the shortest."""
    ids = held_out_documents(NUM_DOCUMENTS)
    length = min(map(len, ids))
    return torch.tensor([document[:length] for document in ids])


def texts_of(row: Row, model: Any, questions: Questions) -> dict[str, list[str]]:
    """Return the greedy texts after every prompt of every task."""
    tokenizer = Tokenizer.from_file(str(TEACHER_DIR / "tokenizer.json"))
    lead, names = tokens_before_text(tokenizer), range(tokenizer.get_vocab_size())
    ends = frozenset({EOS_ID} | {token for token in names if any(mark in tokenizer.decode([token]) for mark in STOP)})
    texts = {}
    for task, examples in questions.examples.items():
        prompts = [lead + tokenizer.encode(example.prompt, add_special_tokens=False).ids for example in examples]
        found = answers(lambda: row.cached(model), prompts, MAX_ANSWER_TOKENS, ends)
        texts[task] = [tokenizer.decode(ids) for ids in found]
    return texts


def measure(row: Row, work: Path, steps: int, ids: torch.Tensor, teacher: torch.Tensor, questions: Questions) -> Cell:
    """Return what the model of a row without distillation is worth; ``teacher`` are the teacher's logits of the
    documents ``ids``."""
    model = row.model(work, steps)
    cached = row.cached(model)
    kl, same = divergence(cached, ids, teacher, NUM_PROMPT)
    counts = [kl.shape[1]] * len(kl)
    cell: Cell = {
        "name": row.name,
        "kl": asdict(bootstrap_interval(kl.sum(1).tolist(), counts)),
        "agreement": asdict(bootstrap_interval(same.sum(1).tolist(), counts)),
    }
    merged = cached.change
    retained = merged.retained_share if isinstance(merged, MergedPairs) else 0.0
    if isinstance(merged, MergedPairs) and merged.distances:
        found = torch.cat(merged.distances)[::7]
        cell["distance"] = found.quantile(torch.tensor(QUANTILES, dtype=found.dtype)).tolist()
    cell |= {"retained": retained, "bytes_per_token": bytes_per_token(model.sizes, row, retained)}
    return cell | {"correct": correct_of(questions.examples, texts_of(row, model, questions))}


def measure_trained(variant: Variant, name: str, work: Path, steps: int) -> Cell:
    """Return the KL of a distilled student over its steps, on the first of the documents, read in one piece."""
    student_of(variant, work, steps)
    return {"name": name, "curve": curve_of(variant, work)}


def cells_of(rows: Sequence[Row], args: Any) -> dict[str, Cell]:
    """Return the rows that are measured by the end of ``--minutes``, from ``--work`` where they were before."""
    deadline = time.monotonic() + 60 * args.minutes
    torch.set_num_threads(1)
    questions, ids = Questions.of(args), documents()
    cells: dict[str, Cell] = {}
    teacher = None
    for row in tqdm(rows, unit="row", disable=None):
        file = args.work / "cells" / f"{row.slug}.json"
        if not file.is_file():
            if time.monotonic() > deadline:
                break
            if row.variant is not None and row.is_trained:
                cell = measure_trained(row.variant, row.name, args.work, args.steps)
            else:
                if teacher is None:
                    with torch.inference_mode():
                        teacher = ROWS[0].model(args.work, args.steps)(ids)
                cell = measure(row, args.work, args.steps, ids, teacher, questions)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(cell))
        cells[row.slug] = json.loads(file.read_text())
    return cells


def measure_all(args: argparse.Namespace) -> Report:
    """Measure what is not known; raises KvforgeError where that is not all."""
    cells = cells_of(ROWS, args)
    if len(cells) < len(ROWS):
        raise KvforgeError(f"{len(cells)} of {len(ROWS)} rows are measured; the same command goes on.")
    return {
        "prompt_tokens": args.length, "documents": NUM_DOCUMENTS, "document_prompt": NUM_PROMPT,
        "curve_documents": CURVE_DOCUMENTS,
        "tokens_per_step": TINY_STUDENT.distill.batch_size * TINY_STUDENT.distill.length, "rows": summarise(cells),
    }  # fmt: skip


EXPERIMENT = Experiment(
    "perf.quality.minicache", __doc__,
    options=(
        asking("minicache", 20, 300, "students and what was measured", "OUTPUT.json and .md"),
        option("--steps", type=int, default=10, help="of a distillation (default %(default)s)"),
        option("--minutes", type=float, default=float("inf"), help="start no row after this time"),
    ),
    measure=measure_all, settings=("seed", "steps"), shown=markdown,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
