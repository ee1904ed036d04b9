"""Which compositions of cut, cache format, eviction and drafts lose least for what a decoded token reads and a prompt
costs.

    python -m perf.quality.frontier [--work DIR] [--num-prompts 8] [--minutes 30] [--append]
    python -m perf.quality.frontier --checkpoint CHECKPOINT --texts TEXTS --calibration TEXT [--output RESULT]

Of the tiny teacher, its distilled student and what ``kvforge rewire`` makes of it; or of CHECKPOINT and what ``kvforge
rewire`` makes of it, on the texts of ``perf.real_model.texts``. Quality: KL(uncut, bf16 || engine) in nats a token in
decode steps behind prompts of --length tokens, the share of equal best tokens, and for the tiny models exact matches of
five tasks. Reads: bytes of cache as the planner counts them, of the tokens that an eviction left, over the tokens that
a step with drafts gave. Prompts: FLOPs as the planner counts them, and CPU seconds until the first token over those of
the uncut engine, by turns. What ``kvforge build`` refuses has its sentence in place of numbers. OUTPUT.jsonl has a line
a composition, which a later run with --append leaves out. Writes OUTPUT.json, .md and .svg.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvforge import SamplingParams
from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.common.errors import BuildError
from kvforge.compiler import BuildOptions
from kvforge.costs.cache import kv_read_bytes, sequence_kv_bytes
from kvforge.costs.flops import prompt_flops
from kvforge.distill import DistillConfig, distill_checkpoint
from kvforge.distill.packing import DataSettings
from kvforge.evaluation.documents import generated_documents, text_documents
from kvforge.evaluation.engine import EngineGenerator
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.prediction.scorer_training import ScorerOptions, train_scorer
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.runtime.speculation.config import SpeculativeConfig
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR, cached_engine, tokenizer_of
from perf.harness.experiment import RESUME, Experiment, Report, Row, number, output, place, seed, work
from perf.harness.files import read_lines, run_cells
from perf.harness.plots import panels
from perf.harness.tables import interval
from perf.quality.answers import Questions, examples_of
from perf.quality.scores import TASKS, accuracy, percent
from perf.real_model.closeness import texts_of
from perf.real_model.policies import decode_logits, divergence
from perf.speculation.fixed_length import FixedLength
from perf.speculation.suffix import Stream

FORCED, NUM_DRAFTS, ROUNDS = 33, 4, 7
SNAPKV, KVZAP = "snapkv:budget=512", "kvzap:budget=2048,block=32,ceiling_percent=400,threshold=400,window=32"
RULES = {"": "", SNAPKV: "SnapKV, 512", KVZAP: "KVzap, −4"}


@dataclass(frozen=True)
class Cut:
    """Which share of the layers prompts skip, and how; ``is_given``: of the committed student; ``is_distilled``: all
    weights above it, on prompts of the tasks and their answers."""

    skipped: float
    group_size: int = 1
    num_anchors: int | None = None
    is_given: bool = False
    is_distilled: bool = False


MODELS = {
    "no cut": None,
    "single input, 2-way, distilled": Cut(0.5, 2, is_given=True),
    "single input": Cut(0.5),
    "single input, upper quarter": Cut(0.25),
    "single input, 2-way, upper quarter": Cut(0.25, 2),
    "blind": Cut(0.5, num_anchors=32),
    "blind, upper quarter": Cut(0.25, num_anchors=32),
    "blind, distilled": Cut(0.5, num_anchors=32, is_distilled=True),
}
NO_CUT, STUDENT, QUARTER = "no cut", "single input, 2-way, distilled", "single input, upper quarter"
BLIND, BLIND_QUARTER = "blind", "blind, upper quarter"


@dataclass(frozen=True)
class Cell:
    """A composition."""

    model: str
    kv_dtype: str = "bfloat16"
    rule: str = ""
    drafts: str = ""

    @property
    def name(self) -> str:
        """In words."""
        kinds = (self.model, "" if self.kv_dtype == "bfloat16" else self.kv_dtype, RULES[self.rule], self.drafts)
        return " + ".join(filter(None, kinds))


TINY = (
    Cell(NO_CUT), Cell(STUDENT), Cell(BLIND_QUARTER), Cell(STUDENT, "k8v4"), Cell(STUDENT, "k8v4", drafts="suffix"),
    Cell(NO_CUT, drafts="suffix"), Cell(BLIND_QUARTER, drafts="suffix"), Cell(BLIND_QUARTER, rule=KVZAP),
    Cell(BLIND_QUARTER, "kivi2"), Cell(BLIND), Cell("blind, distilled"), Cell(NO_CUT, "int8"),
    Cell(NO_CUT, rule=KVZAP), Cell(STUDENT, "kivi2"), Cell(STUDENT, rule=SNAPKV), Cell(STUDENT, rule=KVZAP),
    Cell(NO_CUT, rule=SNAPKV), Cell(BLIND_QUARTER, "k8v4"), Cell(STUDENT, "int8", KVZAP), Cell(NO_CUT, "kivi2"),
    Cell(STUDENT, "kivi4"), Cell(NO_CUT, "int8", KVZAP), Cell(STUDENT, "k8v4", KVZAP), Cell(STUDENT, "kivi2", SNAPKV),
    Cell(NO_CUT, "k8v4"), Cell("single input"), Cell(STUDENT, "int8"), Cell(BLIND, "k8v4"),
    Cell(BLIND_QUARTER, "k8v4", drafts="suffix"), Cell(STUDENT, "int8", KVZAP, "suffix"),
)  # fmt: skip
REAL = (
    Cell(NO_CUT), Cell(QUARTER), Cell(BLIND_QUARTER), Cell(NO_CUT, "k8v4"), Cell(QUARTER, "k8v4"),
    Cell(NO_CUT, rule=KVZAP), Cell(BLIND_QUARTER, "k8v4"), Cell(NO_CUT, "kivi2"), Cell(NO_CUT, "int8"),
    Cell(QUARTER, rule=KVZAP), Cell("single input, 2-way, upper quarter"), Cell(BLIND_QUARTER, rule=KVZAP),
)  # fmt: skip
PAPERS = (
    ("SwiftKV, half", 72.70 / 73.71, 1.0, 0.51), ("SwiftKV, half, 4-way", 71.49 / 73.71, 1.0, 0.507),
    ("SPEED, 24 of 32", 51.2 / 51.4, 0.75, 0.67), ("KVzap, 2 ×", 1.0, 0.5, 1.0), ("KVzap, 4 ×", 1.0, 0.25, 1.0),
)  # fmt: skip
"""Llama-3.1-8B: share of the uncut model's score, of the bytes that a decoded token reads, and of a prompt's cost:
FLOPs of arXiv 2410.03960, seconds of 2605.06105; KVzap (2601.07891) reports a negligible loss."""
SETTINGS = ("length", "num_documents", "num_prompts", "seed")


@dataclass
class Subject:
    """A model, its cuts, and what they are asked."""

    args: argparse.Namespace

    def __post_init__(self) -> None:
        args, self.is_tiny = self.args, self.args.checkpoint is None
        self.rng = random.Random(args.seed)
        self.uncut = self._open(self.engine(Cell(NO_CUT)))
        tokenizer, total = tokenizer_of(self.engine(Cell(NO_CUT))), args.length + FORCED
        if self.is_tiny:
            made = generated_documents(tokenizer, 8 * args.num_documents, 2 * total, args.seed)
            self.documents = [one[:total] for one in made if len(one) >= total][: args.num_documents]
        else:
            of_kind = -(-args.num_documents // len(texts_of(args.texts)))
            kinds = [text_documents(file, tokenizer, of_kind, total) for file in texts_of(args.texts)]
            self.documents = [piece for kind in kinds for piece in kind]
        self.questions = Questions.of(args) if self.is_tiny else None
        self.expected = self._logits(self.uncut)

    def checkpoint(self, model: str) -> Path:
        """Return the checkpoint of a model, made if it is not there yet."""
        source, cut = self.args.checkpoint or TEACHER_DIR, MODELS[model]
        if cut is None or cut.is_given:
            return source if cut is None else STUDENT_DIR
        made: Path = self.args.work / f"checkpoint-{_slug(model)}"
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            layers = read_model_config(open_model(source)).num_layers
            how = {"num_anchors": cut.num_anchors} if cut.num_anchors else {"init": "ridge", "num_samples": 32}
            options = RewireOptions(round(layers * (1 - cut.skipped)), cut.group_size, **how)
            rewired = made.with_name(f"{made.name}-rewired") if cut.is_distilled else made
            rewire_checkpoint(source, rewired, options, calibration=self.args.calibration, overwrite=True)
            if cut.is_distilled:
                self._distill(rewired, made)
        return made

    def _distill(self, rewired: Path, made: Path) -> None:
        """Train 60 steps on other prompts of the tasks than those that are asked, of 400 tokens."""
        data = made.with_suffix(".jsonl")
        examples = examples_of(TASKS, rewired / "tokenizer.json", 400, 320, self.args.seed + 1)
        rows = [{"prompt": one.prompt, "completion": f" {one.answer}."} for each in examples.values() for one in each]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config = DistillConfig(
            "upper", max_steps=60, length=512, batch_size=4, micro_batch=4, lr=1e-3, dtype="float32", device="cpu"
        )
        distill_checkpoint(rewired, made, data, config, DataSettings(512, "answers"), progress=False)

    def engine(self, cell: Cell) -> Path:
        """Return the engine of a composition, built if it is not there yet. Raises BuildError where it is refused."""
        length = self.args.length + max(FORCED, MAX_ANSWER_TOKENS, self.args.num_tokens)
        options = BuildOptions(dtype="bfloat16", kv_dtype=cell.kv_dtype, max_num_seqs=16, max_seq_len=length)
        if cell.rule:
            options = replace(options, kv_policy=cell.rule)
        if cell.drafts or not cell.rule:
            options = replace(options, max_draft_len=NUM_DRAFTS)
        if cell.rule == KVZAP:
            options = replace(options, kv_scorer=str(self._scorer(cell.model)))
        rule = cell.rule.partition(":")[0]
        name = _slug("-".join(filter(None, (cell.model, cell.kv_dtype, rule, rule and cell.drafts))))
        return cached_engine(self.args.work / name, lambda: self.checkpoint(cell.model), options)

    def measure(self, cell: Cell) -> Row:
        """Return what is found of a composition, or by which sentence it is refused."""
        row: Row = {"name": cell.name, "model": cell.model}
        try:
            path = self.engine(cell)
        except BuildError as error:
            return row | {"refused": str(error)}
        generator, length = self._open(path), self.args.length
        engine: Any = generator.llm.engine
        row |= divergence(self.expected, self._logits(generator))
        kept = 1 - engine.stats().get("num_evicted_tokens", 0) / (len(self.documents) * length)
        if self.questions is not None:
            right = accuracy(self.questions.ask(path))
            row["accuracy"] = {key: right[key] for key in ("accuracy", "low", "high")}
        per_step = self._tokens_per_step(engine, cell.drafts) if cell.drafts else 1.0
        manifest, prompt = engine.manifest, kept * length
        of = manifest.model, manifest.kv_dtype
        read = kv_read_bytes(*of, prompt + FORCED / 2, prompt)
        held = sequence_kv_bytes(*of, round(prompt), round(prompt)) / length
        cost, first = prompt_flops(manifest.model, length), self._seconds_over_uncut(generator)
        return row | {
            "kept": kept, "tokens_per_step": per_step, "read_bytes": read / per_step,
            "kept_bytes_per_token": held, "prompt_flops": cost, "first_token": first,
        }  # fmt: skip

    def _open(self, engine: Path) -> EngineGenerator:
        return EngineGenerator(engine, self.args.length, show_progress=False)

    def _scorer(self, model: str) -> Path:
        made: Path = self.args.work / f"scorer-{_slug(model)}"
        if not made.exists():
            options = ScorerOptions(0, 32, 1024, self.args.calibration)
            train_scorer(self.checkpoint(model), made, options, progress=False)
        return made

    def _logits(self, generator: EngineGenerator) -> np.ndarray:
        engine: Any = generator.llm.engine
        return decode_logits(engine, self.documents, self.args.length)

    def _tokens_per_step(self, engine: Any, method: Any) -> float:
        """Tokens of a decode step with drafts, whether they pay or not, one request after the other."""
        config = SpeculativeConfig(method, NUM_DRAFTS, suffix_sharing="all")
        drafted = type(engine)(session=engine.runner._session, tokenizer=engine.tokenizer, speculative=config)
        drafted.drafting._lengths = FixedLength(NUM_DRAFTS)
        params = SamplingParams(temperature=0.0, max_tokens=self.args.num_tokens, ignore_eos=True)
        requests = [(document[: self.args.length], params) for document in self.documents]
        stream = Stream(drafted, requests, 1, time.process_time)
        stream.turn(self.args.num_tokens * len(requests))
        return (stream.num_tokens - len(stream.texts)) / stream.num_rows

    def _seconds_over_uncut(self, generator: EngineGenerator) -> float:
        """CPU time of a random prompt and one token over that of the uncut engine: the median of turns."""
        params, found = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), list[float]()
        vocab = self.uncut.llm.engine.manifest.vocab_size
        for _ in range(ROUNDS + 1):
            seconds = list[float]()
            for each in (self.uncut, generator):
                # Another one each time, that not one is in an engine's prefix cache.
                prompt = [self.rng.randrange(vocab // 4, vocab) for _ in range(self.args.length)]
                begun = time.process_time()
                each.llm.generate([prompt], params, use_tqdm=False)
                seconds.append(time.process_time() - begun)
            found.append(seconds[1] / seconds[0])
        return median(found[1:])


def _slug(text: str) -> str:
    return text.replace(", ", "-").replace(" ", "-")


def make_report(args: argparse.Namespace) -> Report:
    """Measure the compositions that no earlier run has."""
    cells, settings = TINY if args.checkpoint is None else REAL, {name: getattr(args, name) for name in SETTINGS}
    settings["checkpoint"] = None if args.checkpoint is None else args.checkpoint.name
    with tempfile.TemporaryDirectory() as folder:
        lines = args.output.with_suffix(".jsonl") if args.output else Path(folder) / "cells.jsonl"
        if not args.append:
            lines.unlink(missing_ok=True)
        known = {row["name"] for row in read_lines(lines) if row["settings"] == settings}
        left = [cell for cell in cells if cell.name not in known]
        if left:
            subject = Subject(args)
            run_cells(left, lambda cell: [subject.measure(cell) | {"settings": settings}], lines, args.minutes, "cell")
        rows = {row["name"]: row for row in read_lines(lines) if row.pop("settings") == settings}
    found = [rows[cell.name] for cell in cells if cell.name in rows]
    return settings | {"rows": _rounded(with_shares([row for row in found if "refused" not in row], found))}


def _rounded(value: Any) -> Any:
    """Return rows with seven digits of their numbers."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


COSTS = ("read", "prompt")


def with_shares(measured: Sequence[Row], found: Sequence[Row]) -> list[Row]:
    """Return the rows, those that are ``measured`` with their shares of the first one's costs and score, and whether
    they are on the frontier: not another one has a KL, reads and FLOPs as small, and one of these smaller."""
    first = measured[0]
    for row in measured:
        row["read"] = row["read_bytes"] / first["read_bytes"]
        row["prompt"] = row["prompt_flops"] / first["prompt_flops"]
        score = "accuracy" if "accuracy" in row else "agreement"
        row["score"] = row[score]["accuracy" if score == "accuracy" else "value"]
    for row in measured:
        row["share"] = row["score"] / first["score"]
    points = {row["name"]: (row["kl"]["value"], *(row[cost] for cost in COSTS)) for row in measured}
    for row in measured:
        own = points[row["name"]]
        row["is_best"] = not any(
            all(a <= b for a, b in zip(other, own, strict=True)) and other != own for other in points.values()
        )
    return list(found)


def plot(report: Report, path: Path) -> None:
    """The share of the uncut model's score over both costs, the papers' points as stars."""
    rows = [row for row in report["rows"] if "refused" not in row]
    kinds = list(dict.fromkeys(row["model"] for row in rows))
    with panels(path, 8, 4, 2, legend=0) as both:
        for axes, cost, place_ in zip(both, ("read", "first_token"), (2, 3), strict=True):
            for mark, kind in zip("osD^v<>", kinds, strict=False):
                own = [row for row in rows if row["model"] == kind]
                axes.plot([row[cost] for row in own], [100 * row["share"] for row in own], mark, label=kind, ms=4)
            for paper in PAPERS:
                axes.plot(paper[place_], 100 * paper[1], "k*", ms=7)
                axes.annotate(paper[0], (paper[place_], 100 * paper[1]), fontsize=6)
        for row in rows:
            told = row["name"].partition(" + ")[2]
            if row["is_best"] and told:
                both[0].annotate(told, (row["read"], 100 * row["share"]), fontsize=6, va="top", rotation=-60)
        both[0].set(xlabel="cache read a decoded token, of uncut bf16", ylabel="score, % of uncut bf16")
        both[1].set(xlabel="time to first token, of uncut bf16")
        both[1].legend(fontsize=6, loc="lower left")


def notes(report: Report) -> str:
    """What was asked, and what is refused."""
    refused = [f"- {row['name']}: {row['refused']}" for row in report["rows"] if "refused" in row]
    asked = f"Exact match: five tasks, {report['num_prompts']} prompts each, 95% Wilson intervals. "
    told = (
        f"Prompts of {report['length']} tokens; KL and agreement: {report['rows'][0]['num_tokens'] // (FORCED - 1)} "
        f"documents and the {FORCED - 1} decode steps behind each, 95% intervals over documents. "
        f"{asked if report.get('checkpoint') is None else ''}Reads, kept bytes (of a token of the prompt), "
        "FLOPs and seconds are shares of the uncut bf16 engine's; seconds are CPU time. Drafts change no token, and "
        f"are {NUM_DRAFTS} in every step. In bold: no other row is as good in KL, reads and FLOPs."
    )
    return "\n\n".join([told, *(["Refused:\n\n" + "\n".join(refused)] if refused else [])])


def columns(report: Report) -> list[tuple]:
    """Return the columns; rows that are refused have nothing but their names."""

    def told(show: Any) -> Any:
        return lambda row: None if "refused" in row else show(row)

    size = report["rows"][0]["kept_bytes_per_token"]
    return [
        ("composition", lambda row: f"**{row['name']}**" if row.get("is_best") else row["name"]),
        ("KL", told(lambda row: interval(row["kl"], 4))),
        ("same best token, %", told(lambda row: interval(row["agreement"], 1, 100))),
        ("exact match, %", told(lambda row: percent(row["accuracy"]) if "accuracy" in row else "")),
        ("reads", "read", ".3f"), ("bytes kept", "kept_bytes_per_token", ".3f", 1 / size),
        ("tokens a step", "tokens_per_step", ".2f"), ("prompt FLOPs", "prompt", ".3f"),
        ("time to first token", "first_token", ".2f"),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    "perf.quality.frontier", __doc__,
    options=(
        place("--checkpoint", "in place of the tiny models"), place("--texts", "of --checkpoint: a file a kind"),
        place("--calibration", "text that cuts and scorers of --checkpoint are fitted to"),
        number("--length", 1000, "tokens of a prompt (default %(default)s)"),
        number("--num-documents", 8, "(default %(default)s)"),
        number("--num-prompts", 8, "of each task (default %(default)s)"),
        number("--num-tokens", 64, "of an answer with drafts (default %(default)s)"), seed(1), work("runs/frontier"),
        output("OUTPUT.json, .md and .svg", "perf/results/frontier", as_json=False), RESUME,
    ),
    measure=make_report, title="Compositions", notes=notes, columns=columns, align="lrrrrrrrr", is_dated=True,
    plot=plot, check=lambda args: "--checkpoint needs --texts" if args.checkpoint and not args.texts else None,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
