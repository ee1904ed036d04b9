"""Engines of a model on public benchmarks, by lm-evaluation-harness, beside the model itself in transformers.

    python -m perf.real_model.tasks CHECKPOINT SOURCES NAME=ENGINE ... [--limit 200] [--output perf/results/NAME]

SOURCES has checkouts of public repositories, of which nothing is kept here: ``RepE-Replication``
(rugkqjem/RepE-Replication: ARC-Challenge), ``llm-eval`` (leticiacnavarro/llm-eval: PIQA), ``truthfulqa_experiments``
(benedictflorance/truthfulqa_experiments: TruthfulQA, OpenBookQA), ``hellaswag_text_data`` (klosax/hellaswag_text_data:
HellaSwag), ``FedLS`` (tunx-cyber/FedLS: WinoGrande), ``grade-school-math`` (openai/grade-school-math: GSM8K),
``MLILAB-FedLLM`` (HaeChan0305/MLILAB-FedLLM: MMLU); what is not there is left out. Tasks are the harness's own, on the
first --limit questions of each file, without examples but for five of MMLU and GSM8K. A score is the harness's accuracy
(of ARC, OpenBookQA, PIQA and HellaSwag by the answer's length in characters, of GSM8K by an answer's last number),
beside it the difference to transformers in bf16 on the same questions with its 95% interval. The harness's model of
transformers needs accelerate, too. Writes OUTPUT.json and .md.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvforge.common.errors import MissingToolError
from kvforge.evaluation.bootstrap import bootstrap_interval
from kvforge.evaluation.lm_run import task_manager
from perf.harness.experiment import Experiment, Report, told
from perf.harness.options import named, number, option, output, place, work
from perf.harness.tables import Row, columns_table, interval
from perf.peers.prepare import prepare_peer
from perf.real_model.task_files import task_definitions

MODEL = "transformers, bf16"
Scores = Mapping[str, list[float]]
"""Task to the scores of its questions."""


def scores_of(model: Any, tasks: dict[str, tuple[list[str], str]], manager: Any) -> Scores:
    """Run tasks, which ``manager`` knows, on a model of the harness."""
    from lm_eval import simple_evaluate

    common = {"task_manager": manager, "bootstrap_iters": 0, "log_samples": True, "verbosity": "ERROR"}
    found: dict[str, list[float]] = {}
    for name, (parts, metric) in tasks.items():
        results = simple_evaluate(model, tasks=parts, **common)
        metric, _, filtered = metric.partition(",")
        found[name] = [
            float(each[metric])
            for own in results["samples"].values()
            for each in sorted(own, key=lambda each: int(each["doc_id"]))
            if each["filter"] == (filtered or "none")
        ]
    return found


def rows_of(name: str, scores: Scores, beside: Scores) -> list[dict[str, Any]]:
    """Return a row for each task: the mean, and what it is more than ``beside``'s, question by question."""
    rows = []
    for task, own in scores.items():
        ones = [1.0] * len(own)
        more = [mine - theirs for mine, theirs in zip(own, beside[task], strict=True)]
        same = sum(mine == theirs for mine, theirs in zip(own, beside[task], strict=True))
        row = {"name": name, "task": task, "num_questions": len(own), "score": asdict(bootstrap_interval(own, ones))}
        rows.append(row | {"more": asdict(bootstrap_interval(more, ones)), "same": same / len(own)})
    return rows


def markdown(report: Report) -> str:
    """Scores, and differences to the model's own."""
    of_name: dict[str, Row] = {}
    for row in report["rows"]:
        of_name.setdefault(row["name"], {"name": row["name"]})[row["task"]] = row
    first, *others = of_name.values()
    parts = [told(report)]
    for title, part, rows in (
        ("Score, %, 95% interval", "score", [first, *others]),
        (f"More than {MODEL}, points, 95% interval of pairs", "more", others),
    ):
        columns = [
            (
                f"{task} ({first[task]['num_questions']})",
                lambda own, at=task, part=part: interval(own[at][part], 1, 100),
            )
            for task in list(first)[1:]
        ]
        parts += [title, columns_table([("", "name"), *columns], rows, "l" + "r" * len(columns))]
    return "\n\n".join(parts) + "\n"


def make_report(args: argparse.Namespace) -> Report:
    """Measure the model and every engine on every task."""
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise MissingToolError(
            f"the harness's own model cannot be imported ({error}); install accelerate beside it."
        ) from error

    from kvforge.evaluation.lm_harness import EngineLM

    model = prepare_peer(args.checkpoint, args.work / args.checkpoint.name, Path(), "transformers")
    with tempfile.TemporaryDirectory() as folder:
        tasks = task_definitions(args.sources, Path(folder), args.limit)
        manager = task_manager(Path(folder))
        beside = scores_of(HFLM(str(model), dtype="bfloat16", device="cpu", batch_size=8), tasks, manager)
        rows = rows_of(MODEL, beside, beside)
        for name, engine in args.engines:
            rows += rows_of(name, scores_of(EngineLM(engine, show_progress=False), tasks, manager), beside)
    return {"rows": rows}


EXPERIMENT = Experiment(
    "perf.real_model.tasks", __doc__,
    options=(
        place("checkpoint", "a directory, or a GGUF file"), place("sources"),
        option("engines", type=named, nargs="+", metavar="NAME=ENGINE"),
        number("--limit", 200, "questions of a benchmark (default %(default)s)"),
        work(Path(tempfile.gettempdir()) / "kvforge-peers", "the model as transformers reads it, kept"),
        output("OUTPUT.json and .md"),
    ),
    measure=make_report, is_dated=True, shown=markdown,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
