"""Answers and distributions of the tiny models with quantized weights against their own with bf16 weights.

    python -m perf.quality.weight [--work DIR] [--num-prompts 500] [--length 500] [--num-documents 60] [--only "no cut"]

Both committed models, on the same prompts; answers are kept under --work, so an interrupted run continues. Agreement
and perplexity are those of the prompts' own tokens, with bf16 weights as the teacher. --weights chooses rows: int8;
int4 as an engine rounds by itself (int4_scales: with scales in place of steps, int4_zeros: with zero points besides),
by each group's largest magnitude (int4_largest), and by the recipe int4 of `kvforge quantize` (int4_inputs). Writes
OUTPUT.json and .md.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.evaluation.compare import Comparison, compare_with_teacher, fidelity, perplexity
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.manifest import load_manifest
from kvforge.runtime.llm import LLM
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine
from perf.harness.experiment import Experiment, Report, Row, chosen, interval, option
from perf.harness.machine import machine_fields
from perf.quality.answers import Questions
from perf.quality.rounded_weights import by_inputs, by_largest
from perf.quality.scores import TASKS, accuracy, asking, difference, percent, points, texts_changed

MODELS = {"no cut": TEACHER_DIR, "cut, 2-way": STUDENT_DIR}
PLAIN = "bfloat16"
Rounding = Callable[[Path, Path], Path]
QUANTIZED: dict[str, tuple[str, Rounding | None]] = {
    "int8": ("int8", None), "int4_largest": ("int4", by_largest), "int4": ("int4", None),
    "int4_scales": ("int4_scales", None), "int4_zeros": ("int4_zeros", None), "int4_inputs": ("int4", by_inputs),
}  # fmt: skip
"""Of each row the engine's weight dtype, and what rounds the checkpoint where the engine does not."""


def engine_of(name: str, kind: str, length: int, work: Path) -> Path:
    """Return the engine of a model, built if it is not there yet."""
    checkpoint = MODELS[name]
    weight_dtype, rounding = QUANTIZED.get(kind, (kind, None))
    options = BuildOptions(
        dtype="bfloat16", weight_dtype=weight_dtype, max_num_seqs=32, max_seq_len=length + MAX_ANSWER_TOKENS
    )

    def rounded() -> Path:
        return rounding(checkpoint, work / "rounded" / f"{checkpoint.name}-{kind}") if rounding else checkpoint

    return cached_engine(work / "engines" / f"{checkpoint.name}-{kind}-{length}", rounded, options)


def rows_of(name: str, questions: Questions, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each kind of weights of a model: bytes and accuracy, and what differs from bf16."""
    engines = {kind: engine_of(name, kind, args.length, args.work) for kind in (PLAIN, *args.weights)}
    cells = {kind: questions.ask(engine) for kind, engine in engines.items()}
    plain = LLM(engines[PLAIN], enable_prefix_cache=False, kv_cache_gib=0.2)
    prompts = [example.prompt for example in chain.from_iterable(zip(*questions.examples.values(), strict=True))]
    assert plain.tokenizer is not None
    documents = [plain.tokenizer.encode(prompt) for prompt in prompts[: args.num_documents]]
    rows = []
    for kind, engine in engines.items():
        row = {"model": name, "weights": kind, "weight_bytes": load_manifest(engine).weight_bytes}
        row["accuracy"] = accuracy(cells[kind])
        if kind != PLAIN:
            rounded = LLM(engine, enable_prefix_cache=False, kv_cache_gib=0.2)
            row["difference"] = difference(cells[PLAIN], cells[kind])
            row["texts_changed"] = texts_changed(cells[PLAIN], cells[kind])
            compared = compare_with_teacher(rounded, plain, documents)
            row["num_tokens"] = sum(compared.num_tokens)
            row["fidelity"] = fidelity(compared) | {"perplexity_ratio": perplexity_ratio(compared)}
        rows.append(row)
    return rows


def perplexity_ratio(compared: Comparison) -> dict[str, float]:
    """Return the student's perplexity over the teacher's, paired by document: {value, low, high}."""
    more = [ours - theirs for ours, theirs in zip(compared.student_nll, compared.teacher_nll, strict=True)]
    return asdict(perplexity(more, compared.num_tokens))


def notes(report: Report) -> str:
    """What was asked, and how weights were rounded."""
    num_tokens = next(row["num_tokens"] for row in report["rows"] if "num_tokens" in row)
    return (
        f"Tiny models, {len(TASKS) * report['num_prompts']} prompts of {report['length']} tokens (seed "
        f"{report['seed']}), greedy, exact match in per cent with its 95% Wilson interval; paired difference in "
        f"points with its 95% interval, prompts gained and lost, exact McNemar p. Top token, KL to {PLAIN} and "
        f"perplexity on {num_tokens} tokens of {report['num_documents']} of the prompts, intervals over these. "
        "int4_largest: linear layers rounded by each group's largest magnitude; int4_scales: by the best scale of "
        "some; int4: the same in steps; int4_inputs: by `kvforge quantize --recipe int4`, calibrated with other "
        "generated texts. The head is in every one rounded by the engine, by the best scale of some."
    )


def columns(report: Report) -> list[tuple]:
    """Return the table's columns; what compares with bf16 is empty for bf16 itself."""

    def near(row: Row, name: str) -> dict[str, float] | None:
        return row["fidelity"][name] if "fidelity" in row else None

    def perplexity_of(row: Row) -> float:
        others = (
            other["fidelity"] for other in report["rows"] if other["model"] == row["model"] and "fidelity" in other
        )
        return (near(row, "perplexity") or next(others)["teacher_perplexity"])["value"]

    def more(row: Row) -> str | None:
        found = near(row, "perplexity_ratio")
        return found and interval({part: found[part] - 1 for part in found}, 2, 100, "+")

    return [
        ("model", "model"), ("weights", "weights"), ("read by a step", "weight_bytes", "{:.2f} MB", 1e-6),
        ("exact match", lambda row: percent(row["accuracy"])),
        (f"− {PLAIN}", lambda row: points(row["difference"], 2) if "difference" in row else None),
        ("texts changed", "texts_changed"),
        ("same top token", lambda row: (found := near(row, "agreement")) and found["value"], ".2%"),
        ("KL, nats", lambda row: (found := near(row, "kl")) and interval(found, 2, kind="g")),
        ("perplexity", perplexity_of, ".4f"), (f"over {PLAIN}'s, %", more),
        *((task, lambda row, task=task: 100 * row["accuracy"]["tasks"][task], ".1f") for task in TASKS),
    ]  # fmt: skip


def measure(args: argparse.Namespace) -> Report:
    """Ask and compare."""
    questions = Questions.of(args)
    rows = [row for name in tqdm(args.only, unit="model") for row in rows_of(name, questions, args)]
    return {**machine_fields(), "rows": rows}


EXPERIMENT = Experiment(
    "perf.quality.weight", __doc__,
    options=(
        asking("weight-quality", 500, 500, "engines and answers", "OUTPUT.json and .md"),
        option("--num-documents", type=int, default=60, help="prompts whose tokens are scored (default 60)"),
        chosen("--only", list(MODELS), "models (default: all)"), chosen("--weights", list(QUANTIZED), "default: all"),
    ),
    measure=measure, settings=("num_prompts", "length", "num_documents", "seed"),
    title="Quality with quantized weights", notes=notes, columns=columns,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
