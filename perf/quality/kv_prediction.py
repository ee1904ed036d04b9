"""Predicted caches against quality and time to first token (arXiv 2410.08391), beside SwiftKV cuts, here.

    python -m perf.quality.kv_prediction [--work DIR] [--num-prompts 40] [--length 300] [--steps 150]

The auxiliary model begins as the teacher's own lower layers; maps are fitted, or trained with it on the documents that
the committed SwiftKV student was distilled on. All are built in bf16 and asked the same held-out prompts; then requests
run one at a time for the time to their first token, the model's own steps included. Everything but times is kept under
--work: an interrupted run continues. Writes OUTPUT.json, .md and .png.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from kvforge.common.exact_intervals import ExactTokens
from kvforge.evaluation.engine import EngineGenerator
from kvforge.evaluation.score import MAX_ANSWER_TOKENS
from kvforge.training.config import TINY_STUDENT
from perf.harness.command import run_main
from perf.harness.engines import TEACHER_DIR
from perf.quality.answers import Questions
from perf.quality.kv_prediction_costs import first_token_seconds, flops
from perf.quality.kv_prediction_maps import differences
from perf.quality.kv_prediction_models import (
    MAX_SEQ_LEN,
    NUM_LAYERS,
    STUDENT,
    plain_engine,
    predicting_engine,
    predictor_of,
)
from perf.quality.kv_prediction_report import write_report
from perf.quality.scores import correct_of, quality_parser

NUM_TIMED = 20
KINDS = ("fitted", "own", "trained")
OWN = (0, 1, 2, 3, 3, 3, 3, 3)
"""Each layer itself, and above the teacher's lower four the last of them: what SwiftKV with cut 3 reads."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A row: a plain ``model`` as ``plain_engine`` has it, or a predictor, trained or only fitted, with what of a
    prompt is ``exact``; ``reads`` as ``predictor_of`` takes it."""

    name: str
    model: int | str | None = None
    exact: ExactTokens | None = None
    is_trained: bool = False
    reads: tuple[int, ...] | None = None

    @property
    def kind(self) -> str:
        """One of ``KINDS``, of a predictor."""
        return "trained" if self.is_trained else "fitted" if self.reads is None else "own"

    def engine(self, work: Path, steps: int) -> Path:
        """Return the row's engine, made if it is not there yet."""
        if self.exact is not None:
            return predicting_engine(self.reads, steps if self.is_trained else 0, work)
        return plain_engine(self.model, work)


def settings() -> list[Setting]:
    """Return the rows, the teacher first."""
    exact = {
        "last token exact": ExactTokens(),
        "last 32 exact": ExactTokens(last=32),
        "first 16, last 32 exact": ExactTokens(16, 32),
        "last 32 and a quarter exact": ExactTokens(last=32, share=0.25),
        "last 32 and half exact": ExactTokens(last=32, share=0.5),
    }
    plain = [
        Setting("teacher"),
        Setting("SwiftKV, cut 4, 2-way, distilled", STUDENT),
        Setting("SwiftKV, cut 3, fitted", 3),
    ]
    chosen = ("last token exact", "last 32 exact", "last 32 and half exact")
    fitted = [Setting(f"fitted, {how}", exact=exact[how]) for how in chosen]
    own = [Setting(f"own layers, fitted, {how}", exact=exact[how], reads=OWN) for how in chosen[:2]]
    trained = [Setting(f"trained, {how}", exact=each, is_trained=True) for how, each in exact.items()]
    return [*plain, *fitted, *own, *trained]


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


def main() -> None:
    """Make, ask, time and report."""
    parser = quality_parser(
        __doc__, "kv-prediction", 40, 300, "predictors, students, engines and answers", "OUTPUT.json, .md and .png"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=TINY_STUDENT.distill.max_steps,
        help="of the training (default %(default)s)",
    )
    kinds_help = "predictors to measure: fitted, own (their layers), trained (default: all)"
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, metavar="KIND", help=kinds_help)
    args = parser.parse_args()
    if args.length + MAX_ANSWER_TOKENS > MAX_SEQ_LEN:
        parser.error(f"--length can be at most {MAX_SEQ_LEN - MAX_ANSWER_TOKENS}")
    args.work.mkdir(parents=True, exist_ok=True)
    questions = Questions.of(args)
    tokenizer = Tokenizer.from_file(str(TEACHER_DIR / "tokenizer.json"))
    prompts = [tokenizer.encode(example.prompt).ids for example in next(iter(questions.examples.values()))[:NUM_TIMED]]
    chosen = [row for row in settings() if row.exact is None or row.kind in args.kinds]
    cells: dict[str, Any] = {}
    for setting in tqdm(chosen, desc="settings", unit="setting"):
        engine = setting.engine(args.work, args.steps)
        texts = answers(setting, engine, questions)
        cells[setting.name] = {
            "correct": correct_of(questions.examples, texts),
            "flops": flops(engine, args.length, setting.exact),
        }
    for setting in tqdm(chosen, desc="times", unit="setting"):
        engine = setting.engine(args.work, args.steps)
        cells[setting.name]["first_token_s"] = first_token_seconds(engine, prompts, setting.exact)
    kinds = {row.name.rpartition(", ")[0]: row for row in chosen if row.exact == ExactTokens()}
    steps_of = {name: args.steps if row.is_trained else 0 for name, row in kinds.items()}
    maps = {name: differences(predictor_of(row.reads, steps_of[name], args.work)) for name, row in kinds.items()}
    about = {
        "prompt_tokens": args.length,
        "seed": args.seed,
        "steps": args.steps if "trained" in args.kinds else 0,
        "tokens_per_step": TINY_STUDENT.distill.batch_size * TINY_STUDENT.distill.length,
        "auxiliary_layers": NUM_LAYERS,
        "timed": NUM_TIMED,
    }
    write_report(cells, maps, about, args.output)
    print(args.output.with_suffix(".md").read_text())


if __name__ == "__main__":
    sys.exit(run_main(main))
