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
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.manifest import load_manifest
from kvforge.quantize import quantize_checkpoint
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine
from perf.harness.experiment import Experiment, Report, option
from perf.harness.machine import machine_fields
from perf.harness.plots import panels
from perf.quality.answers import Questions
from perf.quality.scores import Cell, accuracy, asking, bars, difference, percent, points, task_columns, texts_changed
from perf.training.config import TINY_STUDENT
from perf.training.student import make_student
from perf.training.tokenizer import FastEncoder

MODELS: dict[str, int | None] = {"no cut": None, "cut": 1, "cut, 2-way": 2, "cut, 4-way": 4}
"""Row names and AcrossKV group sizes; None is the teacher."""
KV_DTYPES = ("bfloat16", "fp8", "int8", "int4", "k8v4", "kivi4", "kivi3", "kivi2", "fp8_static")


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


BASELINE = "bfloat16"
COLOURS = {
    "bfloat16": "tab:blue", "fp8": "tab:orange", "int8": "tab:green", "int4": "tab:purple", "k8v4": "tab:olive",
    "kivi2": "tab:brown", "kivi3": "tab:cyan", "kivi4": "tab:pink", "fp8_static": "tab:red",
}  # fmt: skip


def summarise(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per cell: cache size, accuracy with its 95% Wilson interval, per task, and the differences,
    paired by prompt, from the same model's bf16 cache and from the first cell."""
    baseline = {cell["model"]: cell for cell in cells if cell["kv_dtype"] == BASELINE}
    full = max(cell["kv_element_bytes_per_token"] for cell in cells)
    rows = []
    for cell in cells:
        row: dict[str, Any] = {
            **{name: cell[name] for name in ("model", "kv_dtype", "kv_bytes_per_token", "kv_element_bytes_per_token")},
            "kv_reduction": 1 - cell["kv_element_bytes_per_token"] / full,
            **accuracy(cell),
        }
        for name, other in (("versus_bfloat16", baseline.get(cell["model"])), ("versus_first", cells[0])):
            if other is not None and other is not cell:
                row[name] = difference(other, cell) | {"texts_changed": texts_changed(other, cell)}
        rows.append(row)
    return rows


def _points(row: dict[str, Any], name: str) -> str:
    return f"{points(row[name], 2)}, {row[name]['texts_changed']} texts" if name in row else ""


def notes(report: dict[str, Any]) -> str:
    """What was asked and what is compared."""
    first = report["rows"][0]
    return (
        f"Tiny models, {first['num_prompts']} prompts of {report['prompt_tokens']} tokens "
        f"({', '.join(first['tasks'])}, equally many; seed {report['seed']}), greedy, exact match in per cent with "
        "its 95% Wilson interval. The “versus” columns pair prompt by prompt: difference in points with its 95% "
        "interval (Agresti and Min 2005), prompts gained and lost, the exact McNemar p, and how many of the "
        "generated texts are not the same. Reduction counts K and V elements against the model without a cut in "
        "bf16, as the paper does; bytes per token include the scales (a float per token, head and tensor, which "
        "weighs more here, at 64 elements a head, than at 128)."
    )


def columns(report: dict[str, Any]) -> list[tuple]:
    """Return the table's columns."""
    first = report["rows"][0]
    return [
        ("model", "model"), ("KV cache", "kv_dtype"), ("KV bytes per token", "kv_bytes_per_token"),
        ("reduction", "kv_reduction", ".2%"), ("exact match", percent),
        ("versus its bfloat16", lambda row: _points(row, "versus_bfloat16")),
        (f"versus {first['model']}, {first['kv_dtype']}", lambda row: _points(row, "versus_first")),
        *task_columns(first["tasks"]),
    ]  # fmt: skip


def plot(report: dict[str, Any], path: Path) -> None:
    """Left: accuracy over cache size. Right: paired difference from the same model's bf16 cache. 95% intervals."""
    rows = report["rows"]
    with panels(path, 11, 4.2, 2, legend=0) as (left, right):
        names = list(dict.fromkeys(row["model"] for row in rows))
        kinds = list(dict.fromkeys(row["kv_dtype"] for row in rows))
        for order, kv_dtype in enumerate(kinds):
            chosen = [row for row in rows if row["kv_dtype"] == kv_dtype]
            colour, label = COLOURS.get(kv_dtype), f"{kv_dtype} cache"
            shift = order - (len(kinds) - 1) / 2
            size = [row["kv_bytes_per_token"] + 25 * shift for row in chosen]
            bars(left, size, chosen, color=colour, label=label)
            compared = [row["versus_bfloat16"] for row in chosen if "versus_bfloat16" in row]
            places = [names.index(row["model"]) - 0.15 * shift for row in chosen if "versus_bfloat16" in row]
            if compared:
                bars(right, places, compared, "difference", across=True, color=colour, label=label)
        sizes: dict[int, list[str]] = {}
        for row in rows:
            if row["kv_dtype"] == BASELINE:
                sizes.setdefault(row["kv_bytes_per_token"], []).append(row["model"])
        for size_, models in sizes.items():
            left.annotate("\n".join(models), (size_, left.get_ylim()[0]), ha="center", va="bottom", fontsize=8)
        left.set(xlabel="KV cache, bytes per token, scales included", ylabel="exact match, %")
        right.set(xlabel="exact match minus the bf16 cache's, points", yticks=range(len(names)), yticklabels=names)
        right.invert_yaxis()
        right.axvline(0, color="black", linewidth=0.8)
        left.figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(kinds), fontsize=8)
        left.figure.suptitle(f"Tiny models, {rows[0]['num_prompts']} prompts, 95% intervals")


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
