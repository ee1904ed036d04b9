"""Answers of the tiny models at 2048 tokens of context with KVzap, over its budget and over its threshold.

    python -m perf.quality.learned_eviction [--work DIR] [--num-prompts 20] [--units 64] [--model "no cut"]
        [--threshold 400]

Trains a scorer of each model on generated text, builds one engine of each, and asks its copies, which differ in budget
and threshold. Other rules at equal budgets: perf.quality.eviction. Writes OUTPUT.json and .md.
"""

import argparse
import random
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from kvforge.compiler import BuildOptions
from kvforge.evaluation.engine import EngineGenerator
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.prediction.scorer_training import ScorerOptions, train_scorer
from kvforge.runtime import LLM, SamplingParams
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Report, option, positive
from perf.harness.policy_engines import with_parameters
from perf.quality.answers import Questions
from perf.quality.eviction import MODELS
from perf.quality.scores import AGAINST_FULL, against_full, asking, correct_of

LARGEST, BUDGETS, THRESHOLDS = 2048, (256, 512), (400, 500, 600)


def policy_of(budget: int, threshold: int) -> str:
    """Return a policy of the engine that all share: no head keeps more than four times ``LARGEST``."""
    ceiling = 400 * LARGEST // budget
    return f"kvzap:budget={budget},block=32,ceiling_percent={ceiling},threshold={threshold},window=32"


def ask(questions: Questions, engine: Path) -> dict[str, Any]:
    """Return an engine's answers, and the share of a prompt's tokens that a head keeps on average."""
    generator = EngineGenerator(engine, questions.length, show_progress=False)
    texts = {task: generator([example.prompt for example in examples]) for task, examples in questions.examples.items()}
    count = sum(map(len, texts.values()))
    evicted = generator.llm.engine.stats().get("num_evicted_tokens", 0)
    kept = 1 - evicted / (count * questions.length)
    return {"texts": texts, "correct": correct_of(questions.examples, texts), "kept": kept}


def seconds_of(engines: dict[str, Path], length: int, rounds: int = 15) -> dict[str, float]:
    """Return the CPU seconds of a random prompt and two tokens, which every engine is asked for in turn: medians."""
    running = {name: LLM(engine) for name, engine in engines.items()}
    params, seen = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), defaultdict[str, list[float]](list)
    for seed in range(rounds):
        rng = random.Random(seed)
        prompt = [rng.randrange(300, 1500) for _ in range(length)]
        for name, llm in running.items():
            begun = time.process_time()
            llm.generate([prompt], params, use_tqdm=False)
            seen[name].append(time.process_time() - begun)
    return {name: median(found[1:]) for name, found in seen.items()}


def measure(args: argparse.Namespace) -> Report:
    """Ask every engine, then add what other rules answered."""
    questions, results = Questions.of(args), list[dict[str, Any]]()
    for model in args.model or MODELS:
        checkpoint = MODELS[model]
        slug = model.split(",")[0].replace(" ", "-")
        options = BuildOptions(dtype="bfloat16", max_num_seqs=16, max_seq_len=args.length + MAX_ANSWER_TOKENS)
        scorer = args.work / f"{slug}-scorer-{args.units}"
        if not scorer.is_dir():
            train_scorer(checkpoint, scorer, ScorerOptions(args.units, 64, 1024), progress=False)
        own = replace(options, kv_policy=policy_of(LARGEST, 0), kv_scorer=str(scorer))
        engine = cached_engine(args.work / f"{slug}-kvzap-{args.units}", checkpoint, own)
        full = cached_engine(args.work / f"{slug}-full", checkpoint, options)
        results.append({"model": model, "threshold": None, "budget": None} | ask(questions, full))
        for budget, threshold in [(one, 0) for one in BUDGETS] + [
            (LARGEST, one) for one in args.threshold or THRESHOLDS
        ]:
            copy = with_parameters(
                engine, args.work / f"{engine.name}-{budget}-{threshold}", policy_of(budget, threshold)
            )
            results.append({"model": model, "budget": budget, "threshold": threshold} | ask(questions, copy))
    rows = against_full(results, ("threshold", "budget"))
    for row, result in zip(rows, results, strict=True):
        row |= {"rule": "full" if row["budget"] is None else "kvzap", "kept": result["kept"]}
    slug = "no-cut"
    zip_options = replace(options, kv_policy="kvzip:budget=512")
    timed = {
        "full": args.work / f"{slug}-full",
        "kvzap": args.work / f"{slug}-kvzap-{args.units}",
        "kvzip": cached_engine(args.work / f"{slug}-kvzip", MODELS["no cut"], zip_options),
    }
    found = {"prompt_tokens": args.length, "seed": args.seed, "units": args.units}
    return found | {"seconds": seconds_of(timed, args.length), "rows": rows}


EXPERIMENT = Experiment(
    "perf.quality.learned_eviction", __doc__,
    options=(
        asking("kvzap-quality", 20, 2048 - MAX_ANSWER_TOKENS, "engines", "OUTPUT.json and .md"),
        option("--units", type=int, default=64, help="of the scorer's hidden layer; 0: linear (default 64)"),
        option("--model", action="append", choices=list(MODELS), help="default: both"),
        option("--threshold", action="append", type=positive, help=f"default: {', '.join(map(str, THRESHOLDS))}"),
    ),
    measure=measure, title="KVzap: quality over budget and threshold",
    notes="Prompts of {prompt_tokens} tokens, greedy, bf16; scorer with {units} hidden units (0: linear). Threshold in "
    "hundredths, negated; “kept”: the mean share of a prompt's tokens that a head keeps. CPU "
    "seconds of a prompt and two tokens, without a cut, one thread: {seconds}.",
    columns=(
        ("model", "model"), ("rule", "rule"), ("budget", "budget"), ("threshold", "threshold"),
        ("kept", lambda row: "" if row["kept"] is None else f"{100 * row['kept']:.1f}%"), *AGAINST_FULL,
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
