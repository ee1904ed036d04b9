"""Answers of the tiny models on every instruction set that this CPU can run, paired by prompt.

    python -m perf.quality.paths [--work DIR] [--num-prompts 40] [--isa amx --isa avx2] [--weights int8]

One engine for each model; every instruction set answers with it in a process of its own (KVFORGE_CPU_ISA). The first is
what the others are compared with. Everything under --work is kept. Writes OUTPUT.json and .md.
"""

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from kvforge.common.errors import KvforgeError
from kvforge.common.hardware import available_isas
from kvforge.compiler import BuildOptions
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from perf.harness.command import begin_report, run_main
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine
from perf.harness.files import write_report
from perf.harness.tables import markdown_table
from perf.quality.answers import Questions
from perf.quality.scores import accuracy, difference, interval, points, quality_parser, texts_changed

MODELS = {"no cut": TEACHER_DIR, "cut 4 of 8, 2-way": STUDENT_DIR}
WEIGHTS = ("bfloat16", "int8")
ISAS = available_isas()[::-1]


def markdown(report: dict[str, Any]) -> str:
    """Return the table with its explanation."""
    rows = report["rows"]
    head = ["model", "weights", "instruction set", "exact match, %", "versus the first, points", "texts that differ"]
    table = [
        [
            row["model"],
            row["weights"],
            row["isa"],
            interval(row),
            points(row["versus_first"]) if "versus_first" in row else "",
            row.get("texts_changed", ""),
        ]
        for row in rows
    ]
    return (
        "\n".join(
            [
                "# Answers by instruction set",
                "",
                f"Tiny models, {rows[0]['num_prompts']} prompts of {report['prompt_tokens']} tokens, greedy, in bf16. "
                "Exact match in per cent with its 95% Wilson interval; differences paired by prompt, with their 95% "
                f"interval. {report['machine']}.",
                "",
                f"`{report['command']}`",
                "",
                markdown_table(head, table),
            ]
        )
        + "\n"
    )


def main() -> None:
    """Answer and report."""
    length = 500
    parser = quality_parser(__doc__, "paths", 40, length, "engines and answers", "OUTPUT.json and .md")
    parser.add_argument("--isa", action="append", choices=ISAS, help=f"default: {', '.join(ISAS)}")
    parser.add_argument("--weights", action="append", choices=WEIGHTS, help="default: both")
    parser.add_argument("--answer-only", action="store_true", help="answer with KVFORGE_CPU_ISA as it is, for --isa")
    args = parser.parse_args()
    wanted, questions = args.isa or ISAS, Questions.of(args)
    cells = [(model, weights) for model in MODELS for weights in args.weights or WEIGHTS]
    engines = {}
    for model, weights in cells:
        options = BuildOptions(
            dtype="bfloat16", weight_dtype=weights, max_num_seqs=16, max_seq_len=args.length + MAX_ANSWER_TOKENS
        )
        slug = model.replace(", ", "-").replace(" ", "-")
        engines[model, weights] = cached_engine(args.work / "engines" / f"{slug}-{weights}", MODELS[model], options)
    if args.answer_only:
        for engine in engines.values():
            replace(questions, work=args.work / wanted[-1]).ask(engine)
        return
    for isa in tqdm(wanted, unit="set", disable=None):
        command = [sys.executable, "-m", "perf.quality.paths", *sys.argv[1:], "--answer-only"]
        environment = {**os.environ, "KVFORGE_CPU_ISA": isa}
        if subprocess.run([*command, "--isa", isa], env=environment, check=False).returncode:
            raise KvforgeError(f"The answers with KVFORGE_CPU_ISA={isa} could not be made; see above.")
    rows: list[dict[str, Any]] = []
    for (model, weights), engine in engines.items():
        found = {isa: replace(questions, work=args.work / isa).ask(engine) for isa in wanted}
        first = found[wanted[0]]
        for isa, cell in found.items():
            row = {"model": model, "weights": weights, "isa": isa, **accuracy(cell)}
            if cell is not first:
                row |= {"versus_first": difference(first, cell), "texts_changed": texts_changed(first, cell)}
            rows.append(row)
    report = begin_report("perf.quality.paths") | {"prompt_tokens": args.length, "seed": args.seed, "rows": rows}
    print(markdown(report))
    write_report(args.output, report, markdown(report))


if __name__ == "__main__":
    sys.exit(run_main(main))
