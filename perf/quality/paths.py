"""Answers of the tiny models on every instruction set that this CPU can run, paired by prompt.

    python -m perf.quality.paths [--work DIR] [--num-prompts 40] [--isa amx --isa avx2] [--weights int8]

One engine for each model; every instruction set answers with it in a process of its own (KVFORGE_CPU_ISA). The first is
what the others are compared with. Everything under --work is kept. Writes OUTPUT.json and .md.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from tqdm import tqdm

from kvforge.common.errors import KvforgeError
from kvforge.common.hardware import available_isas
from kvforge.compiler import BuildOptions
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine
from perf.harness.experiment import Experiment, Row, flag, option
from perf.quality.answers import Questions
from perf.quality.scores import accuracy, asking, difference, percent, points, texts_changed

MODELS = {"no cut": TEACHER_DIR, "cut 4 of 8, 2-way": STUDENT_DIR}
WEIGHTS = ("bfloat16", "int8")
ISAS = available_isas()[::-1]


def engines_of(args: argparse.Namespace) -> dict[tuple[str, str], Path]:
    """Return the engines by model and weights, built where they are not there yet."""
    engines = {}
    for model, weights in product(MODELS, args.weights or WEIGHTS):
        length = args.length + MAX_ANSWER_TOKENS
        options = BuildOptions(dtype="bfloat16", weight_dtype=weights, max_num_seqs=16, max_seq_len=length)
        slug = model.replace(", ", "-").replace(" ", "-")
        engines[model, weights] = cached_engine(args.work / "engines" / f"{slug}-{weights}", MODELS[model], options)
    return engines


def answer_only(args: argparse.Namespace) -> bool:
    """Answer with this process' instruction set where nothing else is asked for."""
    for engine in engines_of(args).values() if args.answer_only else ():
        replace(Questions.of(args), work=args.work / (args.isa or ISAS)[-1]).ask(engine)
    return args.answer_only


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Answer with every instruction set, and compare."""
    wanted, questions, engines = args.isa or ISAS, Questions.of(args), engines_of(args)
    for isa in tqdm(wanted, unit="set", disable=None):
        command = [sys.executable, "-m", "perf.quality.paths", *sys.argv[1:], "--answer-only"]
        environment = {**os.environ, "KVFORGE_CPU_ISA": isa}
        if subprocess.run([*command, "--isa", isa], env=environment, check=False).returncode:
            raise KvforgeError(f"The answers with KVFORGE_CPU_ISA={isa} could not be made; see above.")
    for (model, weights), engine in engines.items():
        found = {isa: replace(questions, work=args.work / isa).ask(engine) for isa in wanted}
        first = found[wanted[0]]
        for isa, cell in found.items():
            row = {"model": model, "weights": weights, "isa": isa, **accuracy(cell)}
            if cell is not first:
                row |= {"versus_first": difference(first, cell), "texts_changed": texts_changed(first, cell)}
            yield row


EXPERIMENT = Experiment(
    "perf.quality.paths", __doc__,
    options=(
        asking("paths", 40, 500, "engines and answers", "OUTPUT.json and .md"),
        option("--isa", action="append", choices=ISAS, help=f"default: {', '.join(ISAS)}"),
        option("--weights", action="append", choices=WEIGHTS, help="default: both"),
        flag("--answer-only", "answer with KVFORGE_CPU_ISA as it is, for --isa"),
    ),
    measure=lambda args: {"prompt_tokens": args.length, "seed": args.seed, "rows": list(measure(args))},
    instead=answer_only, title="Answers by instruction set",
    notes=lambda report: f"Tiny models, {report['rows'][0]['num_prompts']} prompts of {report['prompt_tokens']} "
    "tokens, greedy, in bf16. Exact match in per cent with its 95% Wilson interval; differences paired by prompt, "
    "with their 95% interval.",
    columns=(
        ("model", "model"), ("weights", "weights"), ("instruction set", "isa"), ("exact match, %", percent),
        ("versus the first, points", lambda row: points(row["versus_first"]) if "versus_first" in row else ""),
        ("texts that differ", "texts_changed"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
