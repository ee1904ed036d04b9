"""Predicted caches against quality and time to first token (arXiv 2410.08391), beside SwiftKV cuts, here.

    python -m perf.quality.kv_prediction [--work DIR] [--num-prompts 40] [--length 300] [--steps 200] [--seeds 1 2 3]

Auxiliary models begin as the teacher's own lower layers, or are a small model of their own, trained here; maps are
fitted, or trained with it on the documents that the committed SwiftKV student was distilled on, with several seeds. All
are built in bf16 and asked the same held-out prompts; then requests run one at a time for the time to their first
token, the model's own steps included. Everything but times is kept under --work: an interrupted run continues. Writes
OUTPUT.json, .md and .png.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from kvforge.common.exact_intervals import ExactTokens
from kvforge.evaluation.engine import EngineGenerator
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from perf.harness.engines import TEACHER_DIR
from perf.harness.experiment import Experiment, Report, number
from perf.harness.rounds import median_interval
from perf.quality.answers import Questions
from perf.quality.kv_prediction_costs import first_token_seconds, flops
from perf.quality.kv_prediction_maps import NUM_DOCUMENTS, differences
from perf.quality.kv_prediction_models import (
    ALONE,
    INDEPENDENT,
    MAX_SEQ_LEN,
    NUM_LAYERS,
    STUDENT,
    Predictor,
    make_predictors,
    plain_engine,
    predicting_engine,
    predictor_of,
)  # fmt: skip
from perf.quality.kv_prediction_report import columns, notes, plot, summarised
from perf.quality.scores import TRAINED, asking, correct_of, too_few_seeds
from perf.training.config import TINY_STUDENT

NUM_STEPS, NUM_TIMED, NUM_ROUNDS = 200, 20, 5
OWN = (0, 1, 2, 3, 3, 3, 3, 3)
"""Each layer itself, and above the teacher's lower four the last of them: what SwiftKV with cut 3 reads."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A row: a plain ``model`` as ``plain_engine`` has it, or a ``predictor`` with what of a prompt is ``exact``; a
    predictor's rows are of one ``kind``."""

    name: str
    kind: str
    model: int | str | None = None
    predictor: Predictor | None = None
    exact: ExactTokens | None = None

    def seeded(self, seeds: list[int]) -> "list[Setting]":
        """Return the row once for each seed of its training, or itself where nothing is trained."""
        if self.predictor is None or not self.predictor.steps:
            return [self]
        return [dataclasses.replace(self, predictor=dataclasses.replace(self.predictor, seed=seed)) for seed in seeds]

    def engine(self, work: Path) -> Path:
        """Return the row's engine, made if it is not there yet."""
        if self.predictor is not None:
            return predicting_engine(self.predictor, work)
        return plain_engine(self.model, work)


def _plain(name: str, model: int | str | None = None) -> Setting:
    return Setting(name, name, model)


def settings(steps: int) -> list[Setting]:
    """Return the rows, the teacher first; trained predictors have so many ``steps``."""
    exact = {
        "last token exact": ExactTokens(),
        "last 32 exact": ExactTokens(last=32),
        "first 16, last 32 exact": ExactTokens(16, 32),
        "last 32 and a quarter exact": ExactTokens(last=32, share=0.25),
        "last 32 and half exact": ExactTokens(last=32, share=0.5),
    }
    few = ("last token exact", "last 32 exact", "last 32 and half exact")
    rows = {
        "fitted": (Predictor(), few),
        "own layers, fitted": (Predictor(reads=OWN), few[:2]),
        "independent, fitted": (Predictor(is_independent=True), few[:1]),
        "trained": (Predictor(steps), tuple(exact)),
        "independent, trained": (Predictor(steps, is_independent=True), few),
    }
    return [
        _plain("teacher"),
        _plain("SwiftKV, cut 4, 2-way, distilled", STUDENT),
        _plain("SwiftKV, cut 3, fitted", 3),
        _plain("independent, alone", ALONE),
        *(
            Setting(f"{name}, {how}", name, predictor=predictor, exact=exact[how])
            for name, (predictor, chosen) in rows.items()
            for how in chosen
        ),
    ]


def answers(setting: Setting, engine: Path, questions: Questions) -> dict[str, list[str]]:
    """Return the texts for every prompt of every task, from the work directory where they are known."""
    key = f"{engine.name}-{setting.name}-{questions.length}-{questions.seed}".replace(" ", "-").replace(",", "")
    file = questions.work / "answers" / f"{key}.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    generator = None
    for task, wanted in questions.examples.items():
        if len(known.get(task, ())) >= len(wanted):
            continue
        generator = generator or EngineGenerator(engine, questions.length, False, exact_tokens=setting.exact)
        known[task] = generator([example.prompt for example in wanted])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".tmp").write_text(json.dumps(known))
        file.with_suffix(".tmp").replace(file)
    return {task: known[task][: len(wanted)] for task, wanted in questions.examples.items()}


def check(args: argparse.Namespace) -> str | None:
    """Say what cannot be asked for."""
    longest = MAX_SEQ_LEN - MAX_ANSWER_TOKENS
    return f"--length can be at most {longest}" if args.length > longest else too_few_seeds(args)


def measure(args: argparse.Namespace) -> Report:
    """Make, ask and time."""
    args.work.mkdir(parents=True, exist_ok=True)
    questions = Questions.of(args)
    rows = {setting.name: setting.seeded(args.seeds) for setting in settings(args.steps)}
    predictors = dict.fromkeys(one.predictor for several in rows.values() for one in several if one.predictor)
    make_predictors(list(predictors), args.work, args.jobs)
    cells: dict[str, Any] = {}
    for name, several in tqdm(rows.items(), desc="settings", unit="setting"):
        engines = [one.engine(args.work) for one in several]
        texts = [answers(one, engine, questions) for one, engine in zip(several, engines, strict=True)]
        cells[name] = {
            "kind": several[0].kind,
            "correct": [correct_of(questions.examples, each) for each in texts],
            "flops": flops(engines[0], args.length, several[0].exact),
        }
    tokenizer = Tokenizer.from_file(str(TEACHER_DIR / "tokenizer.json"))
    prompts = [tokenizer.encode(example.prompt).ids for example in next(iter(questions.examples.values()))[:NUM_TIMED]]
    times: dict[str, list[float]] = {name: [] for name in rows}
    for name in tqdm([*rows] * NUM_ROUNDS, desc="times", unit="setting"):
        one = rows[name][0]
        times[name] += first_token_seconds(one.engine(args.work), prompts, one.exact)
    for name, found in times.items():
        cells[name]["first_token_s"] = median_interval(found)
    kinds = {
        several[0].kind: several[0].predictor
        for several in rows.values()
        if several[0].predictor and several[0].exact == ExactTokens()
    }
    maps = {name: differences(predictor_of(predictor, args.work)) for name, predictor in kinds.items()}
    about = {
        "prompt_tokens": args.length,
        "tokens_per_step": TINY_STUDENT.distill.batch_size * TINY_STUDENT.distill.length,
        "auxiliary_layers": NUM_LAYERS,
        "independent_tokens": sum(stage.max_steps * stage.sequences * stage.length for stage in INDEPENDENT.stages),
        "timed": NUM_TIMED,
        "rounds": NUM_ROUNDS,
        "documents": NUM_DOCUMENTS,
    }
    return {**about, "rows": summarised(cells), "differences": maps}


EXPERIMENT = Experiment(
    "perf.quality.kv_prediction", __doc__,
    options=(
        asking("kv-prediction", 40, 300, "predictors, students, engines and answers"),
        number("--steps", NUM_STEPS, "of a training (default %(default)s)"), *TRAINED,
    ),
    measure=measure, settings=("seed", "seeds", "steps"), check=check, title="Predicted caches beside SwiftKV cuts",
    notes=notes, columns=columns, plot=plot, figure=".png",
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
