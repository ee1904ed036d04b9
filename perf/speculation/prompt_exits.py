"""What it is worth, and what it costs, that the last token of a prompt leaves at the early exit.

    python -m perf.speculation.prompt_exits [--work DIR] [--output STEM]

Answers: the tiny SwiftKV student answers tasks with the full model, with exits of generated tokens, and with exits of
prompts' last tokens too, greedily and at each threshold; exact match is compared prompt by prompt, with a 95% interval.

First tokens: one prompt at a time, timed from the request to its first token, in all three ways in an order that each
round draws anew. A time is held against that without exits of the same prompt and round; rows have medians. The tiny
student has prompts of the tasks, those that exit apart from the others. The 213M model, whose exit is its head and of
which every prompt exits, shows what there is to gain where the graphs take the time. Writes OUTPUT.json and .md.
"""

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvforge.compiler import BuildOptions
from kvforge.evaluation.engine import AnsweredPrompt, EngineGenerator
from kvforge.evaluation.exit_quality import answer_with_exits, exit_quality
from kvforge.evaluation.paired import paired_difference
from kvforge.evaluation.run import EvalOptions, Examples, make_prompts
from kvforge.evaluation.score import is_correct
from kvforge.manifest import load_manifest
from kvforge.runtime import LLMEngine
from kvforge.runtime.sessions.session import load_session
from perf.harness.batch import Batch
from perf.harness.engines import STUDENT_DIR, cached_engine, tokenizer_of
from perf.harness.experiment import Experiment, Report, Row, number, output, told, work
from perf.harness.random_checkpoint import LLAMA_213M
from perf.harness.tables import columns_table, interval
from perf.speculation.self_draft_bound import engine_of as engine_that_agrees

TASKS = ("needle_single", "variables", "list_recall", "arithmetic", "amounts")
THRESHOLDS = (0.5, 0.8, 0.95)
SHORT, LENGTHS = 130, (32, 128, 512)
"""Tokens of the prompts that are timed: of the tiny student, and of the 213M model."""
WAYS: dict[str, tuple[bool, bool]] = {
    "no exits": (False, False),
    "generated": (True, False),
    "prompts too": (True, True),
}
"""Whether there is a threshold, and whether prompts exit."""
ANY = 1e-9
"""A threshold that everyone passes."""
ABOVE = ("above", "threshold", "g")


def answers(engine: Path, num_prompts: int, length: int) -> list[Row]:
    """Return a row for each threshold, without and with exits of prompts: all tasks together, and each."""
    examples = make_prompts(engine, EvalOptions(TASKS, num_prompts, length, seed=2))
    full = EngineGenerator(engine, length, show_progress=False)
    said = {task: full.answer([example.prompt for example in wanted]) for task, wanted in examples.items()}
    right_of_full, rows = _right(examples, said), []
    del full  # its cache has the size of what memory is free
    for threshold in THRESHOLDS:
        right_before = right_of_full
        for prompts in (False, True):
            found = answer_with_exits(engine, threshold, length, examples, prompts=prompts)
            quality, right = exit_quality(examples, said, found), _right(examples, found.answers)
            rows.append({
                "threshold": threshold, "prompts": prompts, "share": quality.share,
                "prompt_share": quality.prompt_share, "full": statistics.fmean(right_of_full),
                "exits": statistics.fmean(right), "same": sum(row.num_same for row in quality.tasks),
                "versus_full": vars(paired_difference(right_of_full, right)),
                "versus_row_before": vars(paired_difference(right_before, right)),
                "tasks": [vars(row) | {"paired": vars(row.paired)} for row in quality.tasks],
            })  # fmt: skip
            right_before = right
    return rows


def _right(examples: Examples, said: dict[str, list[AnsweredPrompt]]) -> list[bool]:
    """Return whether each prompt was answered right, task after task."""
    return [
        is_correct(example, answer.text)
        for task, wanted in examples.items()
        for example, answer in zip(wanted, said[task], strict=True)
    ]


def first_tokens(directory: Path, name: str, prompts: Sequence[list[int]], threshold: float, rounds: int) -> list[Row]:
    """Time each prompt's first token in every way; return a row for the prompts that exit and one for the others."""
    session = load_session(directory, load_manifest(directory))
    engines = {
        way: LLMEngine(
            session=session,
            num_pages=-(-(max(map(len, prompts)) + 1) // session.manifest.page_size),
            enable_prefix_cache=False,
            early_exit_threshold=threshold if has_threshold else None,
            early_exit_prompts=of_prompts,
        )
        for way, (has_threshold, of_prompts) in WAYS.items()
    }
    exits = engines["prompts too"]
    groups = defaultdict[bool, list[list[int]]](list)
    for prompt in prompts:
        before = exits.stats()["num_prompt_early_exits"]
        first_token(exits, prompt)
        groups[exits.stats()["num_prompt_early_exits"] > before].append(prompt)
    rng, rows = random.Random(0), []
    for is_sure, members in groups.items():
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(1 + rounds):
            for prompt in members:
                for way in rng.sample(list(WAYS), len(WAYS)):
                    times[way].append(first_token(engines[way], prompt))
        timed = {way: found[len(members) :] for way, found in times.items()}  # the first round warms up
        plain = timed["no exits"]
        rows.append({
            "model": name, "threshold": threshold, "exits": is_sure, "num_prompts": len(members),
            "num_tokens": statistics.median(map(len, members)), "rounds": rounds,
            "ttft_ms": {way: 1e3 * statistics.median(found) for way, found in timed.items()},
            "of_plain": {
                way: statistics.median(a / b for a, b in zip(found, plain, strict=True))
                for way, found in timed.items()
            },
        })  # fmt: skip
    return rows


def first_token(engine: LLMEngine, prompt: list[int]) -> float:
    """Return the seconds from the request to its only token."""
    batch = Batch(engine, [prompt], 1)
    batch.finish()
    return time.perf_counter() - batch.begun


def measure(args: argparse.Namespace) -> Report:
    """Return everything."""
    student = cached_engine(args.work / "prompt-exits", STUDENT_DIR, BuildOptions(dtype="bfloat16"))
    found = answers(student, args.num_prompts, args.length)
    tokenizer = tokenizer_of(student)
    short = make_prompts(student, EvalOptions(TASKS, 8, SHORT, seed=3))
    prompts = [tokenizer.encode(example.prompt) for wanted in short.values() for example in wanted]
    rows = [row for p in THRESHOLDS[::2] for row in first_tokens(student, "tiny student", prompts, p, args.rounds)]
    agreeing, rng = engine_that_agrees(args.work), np.random.default_rng(0)
    for tokens in LENGTHS:
        prompts = rng.integers(3, LLAMA_213M["vocab_size"], (4, tokens)).tolist()
        rows += first_tokens(agreeing, "213M, cut at half", prompts, ANY, args.rounds)
    return {"answers": found, "first_tokens": rows}


def by_task(report: Report) -> Iterator[Row]:
    """Yield a row of each task, without exits of prompts and with them."""
    for before, row in zip(report["answers"][::2], report["answers"][1::2], strict=True):
        for without, task in zip(before["tasks"], row["tasks"], strict=True):
            share = task["num_prompt_exits"] / task["paired"]["num_prompts"]
            yield {**task, "threshold": row["threshold"], "without": without["exits"], "share": share}


def markdown(report: Report) -> str:
    """Return the tables under what they were measured with."""
    answered = (
        ("exits of", lambda row: "prompts too" if row["prompts"] else "generated tokens"), ABOVE,
        ("tokens that exit", "share", ".1%"), ("prompts that exit", "prompt_share", ".1%"),
        ("exact match", "exits", ".1%"), ("full model's", "full", ".1%"),
        ("difference, points", lambda row: _points(row["versus_full"])),
        ("of prompts alone, points", lambda row: _points(row["versus_row_before"]) if row["prompts"] else ""),
        ("same answers", lambda row: f"{row['same']}/{row['versus_full']['num_prompts']}"),
    )  # fmt: skip
    of_tasks = (
        ("task", "task"), ABOVE, ("prompts that exit", "share", ".0%"), ("full model", "full", ".1%"),
        ("generated", "without", ".1%"), ("prompts too", "exits", ".1%"),
        ("difference, points", lambda row: _points(row["paired"])),
    )  # fmt: skip
    times = (
        ("model", "model"), ("prompt", "num_tokens", ".0f"), ABOVE,
        ("exits", lambda row: "yes" if row["exits"] else "no"), ("prompts", "num_prompts"),
        *((f"{way}, ms", lambda row, way=way: row["ttft_ms"][way], ".2f") for way in WAYS),
        *((f"{way} / no exits", lambda row, way=way: row["of_plain"][way], ".2f") for way in list(WAYS)[1:]),
    )  # fmt: skip
    parts = (
        told(report),
        f"bf16. Answers: the tiny SwiftKV student (cut 4 of 8), prompts of {report['length']} tokens. Differences are "
        "exits less full model, paired by prompt, with a 95% interval, prompts gained and lost; *of prompts alone* is "
        "against exits of generated tokens at the same threshold.",
        columns_table(answered, report["answers"]),
        "Of each task, with exits of prompts too; the difference is from the full model.",
        columns_table(of_tasks, by_task(report)),
        f"First token of one prompt: median of {report['first_tokens'][0]['rounds']} rounds in which all ways take "
        "turns, and median of the quotients with the time without exits in the same round.",
        columns_table(times, report["first_tokens"]),
    )
    return "\n\n".join(parts) + "\n"


def _points(paired: Row) -> str:
    return f"{interval(paired, 1, 100, '+', value='difference')}, +{paired['gained']} -{paired['lost']}"


EXPERIMENT = Experiment(
    "perf.speculation.prompt_exits", __doc__,
    options=(
        work(), number("--num-prompts", 100, "prompts of each task (default 100)"),
        number("--length", 300, "tokens of a prompt (default 300)"),
        number("--rounds", 15, "of first tokens (default 15)"), output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=measure, settings=("length",), shown=markdown,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
