"""Answers of the tiny models under every KV compression: the grid of SwiftKV's Table 7 (arXiv 2410.03960).

    python -m perf.quality.kv [--work DIR] [--num-prompts 500] [--length 500] [--only "cut, 4-way"] [--kv-dtype fp8]

Rows: no cut; cut 4 of 8; the same with AcrossKV groups of 2 and of 4. Columns: bf16, fp8, int8 and int4 cache (a scale
per token and head); with --kv-dtype fp8_static also one of ModelOpt per owner, calibrated here. The students of group
sizes 1 and 4 are distilled here, by the recipe and seed of the committed one. Everything under --work is kept: an
interrupted run continues, and a larger --num-prompts asks only the new prompts. Writes OUTPUT.json, .md and .png.
"""

import argparse
import dataclasses
from pathlib import Path

from tokenizers import Tokenizer
from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.manifest import load_manifest
from kvforge.quantize import quantize_checkpoint
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine
from perf.harness.experiment import Experiment, Report, option
from perf.harness.machine import machine_fields
from perf.quality.answers import Questions
from perf.quality.kv_report import columns, notes, plot, summarise
from perf.quality.scores import Cell, asking
from perf.training.config import TINY_STUDENT
from perf.training.student import make_student
from perf.training.tokenizer import FastEncoder

MODELS: dict[str, int | None] = {"no cut": None, "cut": 1, "cut, 2-way": 2, "cut, 4-way": 4}
"""Row names and AcrossKV group sizes; None is the teacher."""
KV_DTYPES = ("bfloat16", "fp8", "int8", "int4", "k8v4", "kivi2", "fp8_static")


def checkpoint_of(group_size: int | None, work: Path) -> Path:
    """Return the checkpoint of a row; a student that is not committed is distilled, or its distillation continued."""
    if group_size is None:
        return TEACHER_DIR
    if group_size == TINY_STUDENT.rewire.group_size:
        return STUDENT_DIR
    recipe = dataclasses.replace(TINY_STUDENT, rewire=dataclasses.replace(TINY_STUDENT.rewire, group_size=group_size))
    encode = FastEncoder(Tokenizer.from_file(str(TEACHER_DIR / "tokenizer.json")))
    return make_student(recipe, TEACHER_DIR, work / "students" / f"group-{group_size}", encode)


def calibrated(checkpoint: Path, output: Path) -> Path:
    """Return the checkpoint with static scales for its cache at ``output``, calibrated if it is not there yet."""
    if not output.exists():
        quantize_checkpoint(checkpoint, output, "fp8-kv")
    return output


def engine_of(name: str, kv_dtype: str, length: int, work: Path) -> Path:
    """Return the engine of a cell, built if it is not there yet."""
    slug = name.replace(", ", "-").replace(" ", "-")
    engine = work / "engines" / f"{slug}-{kv_dtype}-{length}"
    options = BuildOptions(dtype="bfloat16", kv_dtype=kv_dtype, max_num_seqs=32, max_seq_len=length + MAX_ANSWER_TOKENS)

    def checkpoint() -> Path:
        plain = checkpoint_of(MODELS[name], work)
        return calibrated(plain, work / "calibrated" / slug) if kv_dtype == "fp8_static" else plain

    return cached_engine(engine, checkpoint, options)


def cell(name: str, kv_dtype: str, engine: Path, found: Cell) -> Cell:
    """Return what the report needs of one cell: sizes of its cache, and what was ``found`` of the answers."""
    manifest = load_manifest(engine)
    sizes = ("kv_bytes_per_token", "kv_element_bytes_per_token")
    return {"model": name, "kv_dtype": kv_dtype, **{size: getattr(manifest, size) for size in sizes}, **found}


def measure(args: argparse.Namespace) -> Report:
    """Ask every engine."""
    questions, cells = Questions.of(args), []
    grid = [(name, kv_dtype) for name in args.only or MODELS for kv_dtype in args.kv_dtype or KV_DTYPES[:4]]
    with tqdm(grid, unit="engine") as bar:
        for name, kv_dtype in bar:
            bar.set_description(f"{name}, {kv_dtype}")
            engine = engine_of(name, kv_dtype, args.length, args.work)
            cells.append(cell(name, kv_dtype, engine, questions.ask(engine)))
    return {"prompt_tokens": args.length, "seed": args.seed, **machine_fields(), "rows": summarise(cells)}


TOLD = ", ".join(f'"{name}"' for name in MODELS)
EXPERIMENT = Experiment(
    "perf.quality.kv", __doc__,
    options=(
        asking("kv-quality", 500, 500, "students, engines and answers"),
        option(
            "--only", action="append", choices=list(MODELS), metavar="ROW",
            help=f"rows to answer, of {TOLD} (default: all); may be given several times",
        ),
        option(
            "--kv-dtype", action="append", choices=KV_DTYPES,
            help=f"columns to answer (default: {', '.join(KV_DTYPES[:4])})",
        ),
    ),
    measure=measure, title="Quality under KV compression", notes=notes, columns=columns, plot=plot, figure=".png",
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
