"""Answers and distributions of the tiny models with quantized weights against their own with bf16 weights.

    python -m perf.quality.weight [--work DIR] [--num-prompts 200] [--length 1000] [--num-documents 40]

Both committed models, on the same prompts; answers are kept under --work, so an interrupted run continues. Agreement
and perplexity are those of the prompts' own tokens, with bf16 weights as the teacher. Writes OUTPUT.json and .md.
"""

import argparse
import sys
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.evaluation.compare import compare_with_teacher, fidelity
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.manifest import load_manifest
from kvforge.runtime.llm import LLM
from kvforge.tasks.prompt import Example
from perf.harness.command import run_program
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine
from perf.harness.machine import machine_fields
from perf.harness.tables import markdown_table
from perf.quality.answers import answer, examples_of
from perf.quality.scores import Cell, accuracy, correct_of, difference, points, quality_parser, texts_changed

MODELS = {"no cut": TEACHER_DIR, "cut, 2-way": STUDENT_DIR}
PLAIN = "bfloat16"
QUANTIZED = ("int8", "int4", "int4_zeros")
TASKS = ("needle_single", "variables")


def engine_of(name: str, weight_dtype: str, length: int, work: Path) -> Path:
    """Return the engine of a model, built if it is not there yet."""
    engine = work / "engines" / f"{MODELS[name].name}-{weight_dtype}-{length}"
    options = BuildOptions(
        dtype="bfloat16", weight_dtype=weight_dtype, max_num_seqs=32, max_seq_len=length + MAX_ANSWER_TOKENS
    )
    return cached_engine(engine, MODELS[name], options)


def rows_of(name: str, examples: dict[str, list[Example]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each weight dtype of a model: bytes and accuracy, and what differs from bf16."""
    engines = {kind: engine_of(name, kind, args.length, args.work) for kind in (PLAIN, *QUANTIZED)}
    cells = {}
    for kind, engine in engines.items():
        found = answer(engine, examples, args.length, args.seed, args.work)
        cells[kind] = {"texts": found, "correct": correct_of(examples, found)}
    plain = LLM(engines[PLAIN], enable_prefix_cache=False, kv_cache_gib=0.2)
    prompts = [example.prompt for example in chain.from_iterable(zip(*examples.values(), strict=True))]
    assert plain.tokenizer is not None
    documents = [plain.tokenizer.encode(prompt) for prompt in prompts[: args.num_documents]]
    rows = []
    for kind, engine in engines.items():
        row = {
            "model": name,
            "weight_dtype": kind,
            "weight_bytes": load_manifest(engine).weight_bytes,
            "accuracy": _accuracy(cells[kind]),
        }
        if kind != PLAIN:
            rounded = LLM(engine, enable_prefix_cache=False, kv_cache_gib=0.2)
            row["difference"] = difference(cells[PLAIN], cells[kind])
            row["texts_changed"] = texts_changed(cells[PLAIN], cells[kind])
            row["fidelity"] = fidelity(compare_with_teacher(rounded, plain, documents))
        rows.append(row)
    return rows


def _accuracy(cell: Cell) -> dict[str, Any]:
    found = accuracy(cell)
    return {"value": found["accuracy"], "interval": (found["low"], found["high"]), "tasks": found["tasks"]}


def markdown(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Return the table with its explanation."""
    head = ["model", "weights", "read by a step", f"exact match ({', '.join(TASKS)})", f"− {PLAIN}", "texts changed"]
    head += ["same top token", "KL, nats", "perplexity"]
    told = (
        f"Tiny models, {len(TASKS) * args.num_prompts} prompts of {args.length} tokens (seed {args.seed}), greedy, "
        "exact match in per cent; paired difference in points with its 95% interval, prompts gained and lost, exact "
        f"McNemar p. Top token, KL to {PLAIN} and perplexity on the tokens of {args.num_documents} of the prompts."
    )
    lines = []
    for row in rows:
        tasks = ", ".join(f"{100 * value:.1f}" for value in row["accuracy"]["tasks"].values())
        line = [row["model"], row["weight_dtype"], f"{row['weight_bytes'] / 1e6:.2f} MB"]
        line.append(f"{100 * row['accuracy']['value']:.1f} ({tasks})")
        if row["weight_dtype"] == PLAIN:
            others = [other["fidelity"] for other in rows if other["model"] == row["model"] and "fidelity" in other]
            line += ["", "", "", "", f"{others[0]['teacher_perplexity']['value']:.4g}"]
        else:
            near = row["fidelity"]
            line += [points(row["difference"], 2), row["texts_changed"], f"{100 * near['agreement']['value']:.2f}%"]
            line += [f"{near['kl']['value']:.2g}", f"{near['perplexity']['value']:.4g}"]
        lines.append(line)
    return f"# Quality with quantized weights\n\n{told}\n\n{markdown_table(head, lines)}\n"


def main() -> int:
    """Answer, compare and report."""
    parser = quality_parser(__doc__, "weight-quality", 200, 1000, "engines and answers", "OUTPUT.json and .md")
    parser.add_argument("--num-documents", type=int, default=40, help="prompts whose tokens are scored (default 40)")
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("num_prompts", "length", "num_documents", "seed")}

    def make() -> dict[str, Any]:
        examples = examples_of(TASKS, TEACHER_DIR / "tokenizer.json", args.length, args.num_prompts, args.seed)
        rows = [row for name in tqdm(MODELS, unit="model") for row in rows_of(name, examples, args)]
        return {"command": "python -m perf.quality.weight", **settings, **machine_fields(), "rows": rows}

    return run_program(args, make, lambda report: markdown(report["rows"], args), markdown=True)


if __name__ == "__main__":
    sys.exit(main())
