"""Answers of the tiny models at 2048 tokens of context under ShadowKV, over the sparse budget and the rank.

    python -m perf.quality.shadowkv [--work DIR] [--num-prompts 40] [--cell 256:64] [--model "no cut"]

A cell is a budget in tokens and a rank, BUDGET:RANK; each has an engine, as both are constants of its graphs. Prompts
of 2000 tokens leave 48 for the answer; they have 246 chunks of 8, of which 8 are outliers here (the paper's 48 are
made for 16384 chunks). Everything under --work is kept: an interrupted run continues, a larger --num-prompts asks only
the new prompts, and the report is of all cells asked for. Writes OUTPUT.json, .md and .png.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from perf.harness.command import run_main
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine
from perf.quality.answers import Questions
from perf.quality.scores import quality_parser
from perf.quality.shadowkv_report import write_report

MODELS = {"no cut": TEACHER_DIR, "cut 4 of 8, 2-way": STUDENT_DIR}
BUDGETS, RANKS = (64, 256, 512, 1024), (8, 32, 64, 128)


@dataclass(frozen=True)
class Cell:
    """A budget in tokens and a rank."""

    budget: int
    rank: int


CROSS = tuple(dict.fromkeys([*(Cell(n, 128) for n in BUDGETS), *(Cell(256, r) for r in RANKS)]))
"""The cells of a run that names none: all budgets at full rank, all ranks at one budget."""


def cell_of(text: str) -> Cell:
    """Parse BUDGET:RANK."""
    budget, rank = text.split(":")
    return Cell(int(budget), int(rank))


def engine_of(model: str, cell: Cell | None, length: int, outliers: int, chunk: int, work: Path) -> Path:
    """Return the engine of a cell, or with None that with full attention, built if it is not there yet."""
    slug = model.replace(", ", "-").replace(" ", "-")
    policy, name = "full", f"{slug}-full-{length}"
    if cell is not None:
        policy = f"shadowkv:rank={cell.rank},sparse_budget={cell.budget},num_outlier_chunks={outliers}"
        policy += f",chunk_size={chunk}"
        name = f"{slug}-{cell.budget}-{cell.rank}-{outliers}-{length}" + (f"-chunk{chunk}" if chunk != 8 else "")
    options = BuildOptions(dtype="bfloat16", max_num_seqs=16, max_seq_len=length + MAX_ANSWER_TOKENS, kv_policy=policy)
    return cached_engine(work / "engines" / name, MODELS[model], options)


def main() -> None:
    """Answer and report."""
    length = 2048 - MAX_ANSWER_TOKENS
    parser = quality_parser(__doc__, "shadowkv-quality", 40, length, "engines and answers", "OUTPUT.json, .md and .png")
    parser.add_argument("--outliers", type=int, default=8, help="chunks a KV head keeps exact (default 8)")
    parser.add_argument("--chunk", type=int, default=8, help="tokens of a chunk (default 8)")
    parser.add_argument(
        "--cell", action="append", type=cell_of, metavar="BUDGET:RANK", help="default: a cross of seven"
    )
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: both")
    args = parser.parse_args()
    questions = Questions.of(args)
    cells = [None, *(args.cell or CROSS)]
    results: list[dict[str, Any]] = []
    with tqdm([(model, cell) for model in args.model or MODELS for cell in cells], unit="engine", disable=None) as bar:
        for model, cell in bar:
            bar.set_description(f"{model}, {cell or 'full'}")
            engine = engine_of(model, cell, args.length, args.outliers, args.chunk, args.work)
            shape = {"sparse_budget": cell and cell.budget, "rank": cell and cell.rank}
            results.append({"model": model, **shape, **questions.ask(engine)})
    chosen = "".join(f" --cell {cell.budget}:{cell.rank}" for cell in args.cell or ())
    settings = {
        "command": f"python -m perf.quality.shadowkv --num-prompts {args.num_prompts}{chosen}"
        + (f" --chunk {args.chunk} --outliers {args.outliers}" if args.chunk != 8 else ""),
        "prompt_tokens": args.length,
        "seed": args.seed,
        "num_outlier_chunks": args.outliers,
        "chunk_size": args.chunk,
    }
    write_report(results, settings, args.output)
    print(args.output.with_suffix(".md").read_text())


if __name__ == "__main__":
    sys.exit(run_main(main))
