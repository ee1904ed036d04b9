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
from perf.harness.experiment import Experiment, Report, columns_table, interval, option, told
from perf.harness.tables import markdown_table
from perf.quality.answers import Questions
from perf.quality.cached_model import MergedPairs, answers, divergence
from perf.quality.minicache_rows import (
    MERGED,
    MINICACHE,
    ROWS,
    SEEDS,
    TEACHER,
    TRAINED,
    UNTRAINED,
    Row,
    bytes_per_token,
)
from perf.quality.scores import Cell, accuracy, asking, correct_of, difference, percent
from perf.quality.swiftkv_students import CURVE_DOCUMENTS, curve_of, held_out_documents, student_of
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
                # The KL of a distilled student over its steps, on the first of the documents, read in one piece.
                student_of(row.variant, args.work, args.steps)
                cell = {"name": row.name, "curve": curve_of(row.variant, args.work)}
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


BASE = "mean"
"""The init that the others are compared with: the paper's."""


def summarise(cells: dict[str, Cell]) -> dict[str, Any]:
    """Return the rows by slug: what was measured; but for distilled students exact match with its interval, and the
    difference from the teacher paired by prompt."""
    teacher, rows = cells[TEACHER.slug], {}
    for slug, cell in cells.items():
        rows[slug] = {name: value for name, value in cell.items() if name != "correct"}
        if "correct" in cell:
            rows[slug] |= {**accuracy(cell), "versus_teacher": difference(teacher, cell)}
    return rows


COLUMNS = (
    ("model", "name"), ("bytes/token", "bytes_per_token", ".0f"),
    ("retained %", lambda cell: f"{100 * cell['retained']:.1f}" if cell["is_merged"] else ""),
    ("KL per token", lambda cell: interval(cell["kl"], 4)),
    ("agreement %", lambda cell: percent(cell["agreement"], "value")),
    ("exact match %", percent), ("vs no cut", lambda cell: percent(cell["versus_teacher"], "difference", sign="+")),
)  # fmt: skip


def _seed_line(init: str, rows: dict[str, Any]) -> list[str]:
    """Return the KL of an init's students before and after distillation, and how far each is from ``BASE``'s of the
    same seed."""
    curves, base = ([rows[row.slug]["curve"] for row in TRAINED[name]] for name in (init, BASE))
    found = [curve[-1][1] for curve in curves]
    apart = [value - other[-1][1] for value, other in zip(found, base, strict=True)]
    return [
        f"`{init}`",
        f"{curves[0][0][1]:.4f}",
        f"{sum(found) / len(found):.4f}",
        ", ".join(f"{value:.4f}" for value in found),
        "" if init == BASE else ", ".join(f"{value:+.4f}" for value in apart),
    ]


def markdown(report: Report) -> str:
    """Return the tables with their explanation."""
    rows = report["rows"]
    low, middle, high = rows[MINICACHE.slug]["distance"]
    shown = [rows[row.slug] | {"name": row.name, "is_merged": row.merged} for row in (TEACHER, *MERGED, *UNTRAINED)]
    head = ["init", "KL at step 0", "at the end, mean", "by seed", f"minus `{BASE}` of the seed"]
    parts = [
        "# Merged caches beside shared ones",
        told(report),
        "The tiny teacher and its students of cut 4 with 2-way AcrossKV, in float32. KL to the teacher in nats and "
        f"agreement of the likeliest token: after the first {report['document_prompt']} tokens of "
        f"{report['documents']} held-out documents, token by token, with 95% bootstrap intervals over documents. "
        "Exact match: "
        f"{rows[TEACHER.slug]['num_prompts']} prompts of {report['prompt_tokens']} tokens, greedy, with the 95% Wilson "
        "interval; the last column is paired by prompt. Bytes are those of a bf16 cache. A distillation is "
        f"{report['steps']} steps of {report['tokens_per_step']} tokens.",
        columns_table(COLUMNS, shown),
        f"Distances between the pairs' vectors, angle over pi: 5% are below {low:.2f}, half below {middle:.2f}, "
        f"95% below {high:.2f}.",
        "## Before and after distillation, by where it began",
        f"KL over the first {report['curve_documents']} of these documents, each whole and read in one piece; seeds "
        f"{', '.join(map(str, SEEDS))}.",
        markdown_table(head, [_seed_line(init, rows) for init in TRAINED]),
    ]
    return "\n\n".join(parts) + "\n"


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
