"""Answers of the tiny models at 2048 tokens of context with KVzap, over its budget and over its threshold, beside
KVzip, SnapKV and expected attention that keep as many bytes.

    python -m perf.quality.learned_eviction [--work DIR] [--num-prompts 8] [--units 64] [--model "no cut"]
        [--budget 64 256] [--threshold 400]

Trains a scorer of each model on generated text, builds one engine of each, and asks its copies, which differ in budget
and threshold. Behind each the others are asked, with as many tokens as the whole pages that KVzap has on average when
the prompts have been cut down, rounded up. No head's part of a shared budget has a ceiling. "KL" is that of the next
tokens' probabilities to those of full attention, along full attention's answers but for their first token, which comes
before anything is evicted. Writes OUTPUT.json and .md.
"""

import argparse
import math
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
from kvforge.runtime.scheduling.schedule import Schedule
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Report, numbers, option, positive
from perf.harness.forced import forced_logits
from perf.harness.policy_engines import Cell, Engines, with_parameters
from perf.quality.answers import Questions
from perf.quality.eviction import MODELS
from perf.quality.scores import AGAINST_FULL, against_full, asking, correct_of

LARGEST, BUDGETS, THRESHOLDS = 2048, (64, 256), (400,)
OTHERS = ("kvzip", "snapkv", "expected")
TEXTS = 64, 1024
"""How many texts a scorer is trained on, and the tokens of each."""


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
        """Return an engine's answers, ``kept``, the share of a prompt's tokens that a head keeps on average, the whole
        ``pages`` of these, their KiB, and the divergence from full attention."""
        examples, length = self.questions.examples, self.questions.length
        generator = EngineGenerator(engine, length, show_progress=False)
        running = generator.llm.engine
        assert isinstance(running, LLMEngine)
        left = tokens_left(running)
        answered = {task: generator.answer([one.prompt for one in wanted]) for task, wanted in examples.items()}
        answers = [answer for found in answered.values() for answer in found]
        texts = {task: [answer.text for answer in found] for task, found in answered.items()}
        manifest, kept = load_manifest(engine), [left.get(tuple(one.prompt), len(one.prompt)) for one in answers]
        pages = float(np.mean([-(-count // manifest.page_size) for count in kept]))
        self.answers = self.answers or answers
        logs = dict(self._logs(running))
        self.logs = self.logs or logs
        kl = float(np.mean([np.sum(np.exp(one) * (one - logs[place])) for place, one in self.logs.items()]))
        found = {"kept": sum(kept) / sum(len(one.prompt) for one in answers), "pages": pages, "kl": kl}
        found["kib"] = pages * manifest.page_size * manifest.kv_bytes_per_token / 1024
        return {"texts": texts, "correct": correct_of(examples, texts)} | found

    def _logs(self, engine: LLMEngine) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """Yield the logarithms of the probabilities of each token of the answers but the first."""
        texts = [answer.prompt + answer.token_ids for answer in self.answers]
        starts = [len(answer.prompt) for answer in self.answers]
        for index, place, logits in forced_logits(engine, texts, starts):
            if place > starts[index]:
                shifted = logits.astype(np.float64) - logits.max()
                yield (index, place), shifted - np.log(np.exp(shifted).sum())


def tokens_left(engine: LLMEngine) -> dict[tuple[int, ...], int]:
    """Return, by prompt and as they come, how many tokens a head keeps on average when the prompt's cache is cut down;
    nothing of prompts whose answers end before."""
    change, left = engine.runner.change, dict[tuple[int, ...], int]()

    def note(plan: Schedule) -> None:
        for one in plan.transitions:
            prompt = tuple(one.tokens[: one.num_prompt_tokens].tolist())
            left.setdefault(prompt, one.num_computed + one.cache_offset)
        change(plan)

    engine.runner.change = note  # type: ignore[method-assign]
    return left


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


@dataclass
class OfModel:
    """Engines of a model, by rule: the last one that was asked for."""

    model: str
    args: argparse.Namespace
    last: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._checkpoint, self._slug = MODELS[self.model], self.model.split(",")[0].replace(" ", "-")
        limit = self.args.length + MAX_ANSWER_TOKENS
        self._options = BuildOptions(dtype="bfloat16", max_num_seqs=16, max_seq_len=limit)
        self._others = Engines(self._checkpoint, self._options, self.args.work, f"{self._slug}-")

    def full(self) -> Path:
        """Return the engine that evicts nothing."""
        return self._note("full", self._others.of(Cell("full")))

    def kvzap(self, budget: int, threshold: int) -> Path:
        """Return KVzap's, whose scorer is trained if it is not there."""
        name = f"{self._slug}-kvzap-{self.args.units}"
        scorer = self.args.work / f"{self._slug}-scorer-{self.args.units}"
        if not scorer.is_dir():
            train_scorer(self._checkpoint, scorer, ScorerOptions(self.args.units, *TEXTS), progress=False)
        options = replace(self._options, kv_policy=kvzap_of(LARGEST, 0), kv_scorer=str(scorer))
        engine = cached_engine(self.args.work / name, self._checkpoint, options)
        copy = self.args.work / f"{name}-{budget}-{threshold}"
        return self._note("kvzap", with_parameters(engine, copy, kvzap_of(budget, threshold)))

    def other(self, rule: str, tokens: int) -> Path:
        """Return another rule's, which keeps so many tokens of a head, on average where heads share."""
        if rule != "kvzip":
            return self._note(rule, self._others.of(Cell(rule, tokens)))
        options = replace(self._options, kv_policy=f"kvzip:{without_ceiling(tokens)}")
        return self._note(
            rule, cached_engine(self.args.work / f"{self._slug}-kvzip-{tokens}", self._checkpoint, options)
        )

    def _note(self, rule: str, engine: Path) -> Path:
        self.last[rule] = engine
        return engine


def ask_all(engines: OfModel, questions: Questions) -> Iterator[dict[str, Any]]:
    """Yield what each engine of a model answers: full attention's, then KVzap's, each with those beside it."""
    asking_of, args = Asking(questions), engines.args
    own: dict[str, Any] = {"model": engines.model, "budget": None, "threshold": None}
    yield own | {"rule": "full"} | asking_of.ask(engines.full())
    page_size = load_manifest(engines.last["full"]).page_size
    for budget, threshold in [*((one, 0) for one in args.budget), *((LARGEST, one) for one in args.threshold)]:
        found = asking_of.ask(engines.kvzap(budget, threshold))
        yield own | {"rule": "kvzap", "budget": budget, "threshold": threshold} | found
        tokens = math.ceil(found["pages"]) * page_size
        for rule in OTHERS:
            yield own | {"rule": rule, "budget": tokens} | asking_of.ask(engines.other(rule, tokens))


def measure(args: argparse.Namespace) -> Report:
    """Ask every engine, then compare with full attention."""
    questions = Questions.of(args)
    models = [OfModel(model, args) for model in args.model or MODELS]
    results = [result for engines in models for result in ask_all(engines, questions)]
    rows = against_full(results, ("rule", "budget"))
    for row, result in zip(rows, results, strict=True):
        row |= {key: result[key] for key in ("threshold", "kept", "kib", "kl")}
    found = {"prompt_tokens": args.length, "seed": args.seed, "units": args.units}
    return found | {"seconds": seconds_of(models[0].last, args.length), "rows": rows}


EXPERIMENT = Experiment(
    "perf.quality.learned_eviction", __doc__,
    options=(
        asking("kvzap-rules", 8, 2048 - MAX_ANSWER_TOKENS, "engines", "OUTPUT.json and .md"),
        option("--units", type=int, default=64, help="of the scorer's hidden layer; 0: linear (default 64)"),
        option("--model", action="append", choices=list(MODELS), help="default: both"),
        numbers("--budget", list(BUDGETS), "(default: %(default)s)"),
        option("--threshold", nargs="*", type=positive, default=list(THRESHOLDS), help="(default: %(default)s)"),
    ),
    measure=measure, title="KVzap beside other rules at equal bytes",
    notes="Prompts of {prompt_tokens} tokens, greedy, bf16; scorer with {units} hidden units (0: linear). Threshold in "
    "hundredths, negated; “kept”: the mean share of a prompt's tokens that a head keeps, KiB: their whole pages; KL in "
    "nats to full attention. CPU seconds of a prompt and two tokens, of the first model, one thread: {seconds}.",
    columns=(
        ("model", "model"), ("rule", "rule"), ("budget", "budget"), ("threshold", "threshold"),
        ("kept", lambda row: f"{100 * row['kept']:.1f}%"), ("KiB", "kib", ".0f"), ("KL", "kl", ".4f"), *AGAINST_FULL,
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
