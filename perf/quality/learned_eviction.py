"""Answers of the tiny models at 2048 tokens of context with KVzap, over its budget and over its threshold, beside
KVzip, SnapKV and expected attention that keep as many tokens.

    python -m perf.quality.learned_eviction [--work DIR] [--num-prompts 8] [--units 64] [--model "no cut"]
        [--budget 64 256] [--threshold 400]

Trains a scorer of each model on generated text, builds one engine of each, and asks its copies, which differ in budget
and threshold. Behind each the others are asked: at its budget, or at the tokens that its threshold left, in whole
pages. No head's part of a shared budget has a ceiling. "KL" is that of the next tokens'
probabilities to those of full attention, along full attention's answers but for their first token, which comes before
anything is evicted. Writes OUTPUT.json and .md.
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvforge.compiler import BuildOptions
from kvforge.evaluation.engine import AnsweredPrompt, EngineGenerator
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.manifest import load_manifest
from kvforge.prediction.scorer_training import ScorerOptions, train_scorer
from kvforge.runtime import LLM, LLMEngine, SamplingParams
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Report, numbers, option, positive
from perf.harness.forced import forced_logits
from perf.harness.policy_engines import Cell, Engines, with_parameters
from perf.quality.answers import Questions
from perf.quality.eviction import MODELS
from perf.quality.scores import AGAINST_FULL, against_full, asking, correct_of

LARGEST, BUDGETS, THRESHOLDS = 2048, (64, 256), (400,)
OTHERS = ("kvzip", "snapkv", "expected")


def without_ceiling(budget: int) -> str:
    """Parameters of a budget of which a head may have ``LARGEST`` tokens: so many graphs know as the most."""
    return f"budget={budget},ceiling_percent={-(-100 * LARGEST // budget)}"


def kvzap_of(budget: int, threshold: int) -> str:
    """Return a policy of the engine that all share."""
    return f"kvzap:{without_ceiling(budget)},block=32,threshold={threshold},window=32"


@dataclass
class Asking:
    """Questions to a model's engines, and what full attention answers, which is asked first."""

    questions: Questions
    answers: list[AnsweredPrompt] = field(default_factory=list)
    logs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def ask(self, engine: Path) -> dict[str, Any]:
        """Return an engine's answers, the share of a prompt's tokens that a head keeps on average and its bytes, and
        the divergence from full attention."""
        examples, length = self.questions.examples, self.questions.length
        generator = EngineGenerator(engine, length, show_progress=False)
        answered = {task: generator.answer([one.prompt for one in wanted]) for task, wanted in examples.items()}
        answers = [answer for found in answered.values() for answer in found]
        texts = {task: [answer.text for answer in found] for task, found in answered.items()}
        evicted = generator.llm.engine.stats().get("num_evicted_tokens", 0)
        kept = 1 - evicted / (len(answers) * length)
        num_bytes = round(kept * length * load_manifest(engine).kv_bytes_per_token)
        self.answers = self.answers or answers
        logs = dict(self._logs(generator))
        self.logs = self.logs or logs
        kl = float(np.mean([np.sum(np.exp(one) * (one - logs[place])) for place, one in self.logs.items()]))
        return {"texts": texts, "correct": correct_of(examples, texts), "kept": kept, "kib": num_bytes / 1024, "kl": kl}

    def _logs(self, generator: EngineGenerator) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """Yield the logarithms of the probabilities of each token of the answers but the first."""
        texts = [answer.prompt + answer.token_ids for answer in self.answers]
        starts = [len(answer.prompt) for answer in self.answers]
        engine = generator.llm.engine
        assert isinstance(engine, LLMEngine)
        for index, place, logits in forced_logits(engine, texts, starts):
            if place > starts[index]:
                shifted = logits.astype(np.float64) - logits.max()
                yield (index, place), shifted - np.log(np.exp(shifted).sum())


def seconds_of(engines: dict[str, Path], length: int, rounds: int = 6) -> dict[str, float]:
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
    timed = dict[str, Path]()
    for model in args.model or MODELS:
        checkpoint, asking_of = MODELS[model], Asking(questions)
        slug = model.split(",")[0].replace(" ", "-")
        options = BuildOptions(dtype="bfloat16", max_num_seqs=16, max_seq_len=args.length + MAX_ANSWER_TOKENS)
        scorer = args.work / f"{slug}-scorer-{args.units}"
        if not scorer.is_dir():
            train_scorer(checkpoint, scorer, ScorerOptions(args.units, 64, 1024), progress=False)
        own = replace(options, kv_policy=kvzap_of(LARGEST, 0), kv_scorer=str(scorer))
        engine = cached_engine(args.work / f"{slug}-kvzap-{args.units}", checkpoint, own)
        others = Engines(checkpoint, options, args.work, f"{slug}-")
        full = others.of(Cell("full"))
        results.append({"model": model, "rule": "full", "budget": None, "threshold": None} | asking_of.ask(full))
        of_model = {"full": full, "kvzap": engine}
        for budget, threshold in [*((one, 0) for one in args.budget), *((LARGEST, one) for one in args.threshold)]:
            copy = args.work / f"{engine.name}-{budget}-{threshold}"
            found = asking_of.ask(with_parameters(engine, copy, kvzap_of(budget, threshold)))
            results.append({"model": model, "rule": "kvzap", "budget": budget, "threshold": threshold} | found)
            tokens = round(found["kept"] * args.length / 16) * 16 if threshold else budget
            for rule in OTHERS:
                if rule == "kvzip":
                    zip_options = replace(options, kv_policy=f"kvzip:{without_ceiling(tokens)}")
                    of_model[rule] = cached_engine(args.work / f"{slug}-kvzip-{tokens}", checkpoint, zip_options)
                else:
                    of_model[rule] = others.of(Cell(rule, tokens))
                results.append(
                    {"model": model, "rule": rule, "budget": tokens, "threshold": None} | asking_of.ask(of_model[rule])
                )
        timed = timed or of_model
    rows = against_full(results, ("rule", "budget"))
    for row, result in zip(rows, results, strict=True):
        row |= {key: result[key] for key in ("threshold", "kept", "kib", "kl")}
    found = {"prompt_tokens": args.length, "seed": args.seed, "units": args.units}
    return found | {"seconds": seconds_of(timed, args.length), "rows": rows}


EXPERIMENT = Experiment(
    "perf.quality.learned_eviction", __doc__,
    options=(
        asking("kvzap-quality", 8, 2048 - MAX_ANSWER_TOKENS, "engines", "OUTPUT.json and .md"),
        option("--units", type=int, default=64, help="of the scorer's hidden layer; 0: linear (default 64)"),
        option("--model", action="append", choices=list(MODELS), help="default: both"),
        numbers("--budget", list(BUDGETS), "(default: %(default)s)"),
        option("--threshold", nargs="*", type=positive, default=list(THRESHOLDS), help="(default: %(default)s)"),
    ),
    measure=measure, title="KVzap beside other rules at equal bytes",
    notes="Prompts of {prompt_tokens} tokens, greedy, bf16; scorer with {units} hidden units (0: linear). Threshold in "
    "hundredths, negated; “kept”: the mean share of a prompt's tokens that a head keeps, and its KiB; KL in nats to "
    "full attention. CPU seconds of a prompt and two tokens, of the first model, one thread: {seconds}.",
    columns=(
        ("model", "model"), ("rule", "rule"), ("budget", "budget"), ("threshold", "threshold"),
        ("kept", lambda row: f"{100 * row['kept']:.1f}%"), ("KiB", "kib", ".0f"), ("KL", "kl", ".4f"), *AGAINST_FULL,
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
