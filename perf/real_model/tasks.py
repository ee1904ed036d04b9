"""Engines of a model on public benchmarks, by lm-evaluation-harness, beside the model itself in transformers.

    python -m perf.real_model.tasks CHECKPOINT SOURCES NAME=ENGINE ... [--limit 200] [--output perf/results/NAME]

SOURCES has checkouts of public repositories, of which nothing is kept here: ``RepE-Replication``
(rugkqjem/RepE-Replication: ARC-Challenge), ``llm-eval`` (leticiacnavarro/llm-eval: PIQA), ``truthfulqa_experiments``
(benedictflorance/truthfulqa_experiments: TruthfulQA, OpenBookQA), ``hellaswag_text_data`` (klosax/hellaswag_text_data:
HellaSwag), ``FedLS`` (tunx-cyber/FedLS: WinoGrande), ``MLILAB-FedLLM`` (HaeChan0305/MLILAB-FedLLM: MMLU); what is not
there is left out. Tasks are the harness's own, on the first --limit questions of each file, without examples but for
MMLU's five. A score is the harness's accuracy (of ARC, OpenBookQA, PIQA and HellaSwag by the answer's length in
characters), beside it the difference to transformers in bf16 on the same questions with its 95% interval. The harness's
model of transformers needs accelerate, too. Writes OUTPUT.json and .md.
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
from perf.harness.command import Report, add_report, add_work, begin_dated_report, make_parser, positive, run_program
from perf.harness.tables import markdown_table
from perf.peers.prepare import prepare_peer
from perf.real_model.closeness import named
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
        samples = results["samples"].values()
        found[name] = [
            float(each[metric]) for own in samples for each in sorted(own, key=lambda each: int(each["doc_id"]))
        ]
    return found


def rows_of(name: str, scores: Scores, beside: Scores) -> list[dict[str, Any]]:
    """Return a row for each task: the mean, and what it is more than ``beside``'s, question by question."""
    rows = []
    for task, own in scores.items():
        ones = [1.0] * len(own)
        more = [mine - theirs for mine, theirs in zip(own, beside[task], strict=True)]
        same = sum(mine == theirs for mine, theirs in zip(own, beside[task], strict=True))
        rows.append(
            {
                "name": name,
                "task": task,
                "num_questions": len(own),
                "score": asdict(bootstrap_interval(own, ones)),
                "more": asdict(bootstrap_interval(more, ones)),
                "same": same / len(own),
            }
        )
    return rows


def markdown(report: Report) -> str:
    """Scores, and differences to the model's own."""
    rows = report["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    cells = {(row["name"], row["task"]): row for row in rows}
    names = list(dict.fromkeys(row["name"] for row in rows))
    lines = [f"`{report['command']}`, {report['date']}, {report['machine']}", "", "Score, %, 95% interval", ""]
    heads = [f"{task} ({cells[names[0], task]['num_questions']})" for task in tasks]
    for index, (part, digits) in enumerate((("score", 1), ("more", 1))):
        lines += ["", f"More than {MODEL}, points, 95% interval of pairs", ""] if index else []
        body = [[name, *(_interval(cells[name, task][part], digits) for task in tasks)] for name in names[index:]]
        lines.append(markdown_table(["", *heads], body, "l" + "r" * len(tasks)))
    return "\n".join(lines) + "\n"


def _interval(estimate: dict[str, float], digits: int) -> str:
    low, value, high = (f"{100 * estimate[part]:.{digits}f}" for part in ("low", "value", "high"))
    return f"{value} ({low} to {high})"


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
    return {**begin_dated_report("perf.real_model.tasks"), "rows": rows}


def main() -> int:
    """Print the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="a directory, or a GGUF file")
    parser.add_argument("sources", type=Path)
    parser.add_argument("engines", type=named, nargs="+", metavar="NAME=ENGINE")
    parser.add_argument("--limit", type=positive, default=200, help="questions of a benchmark (default %(default)s)")
    add_work(parser, Path(tempfile.gettempdir()) / "kvforge-peers", "the model as transformers reads it, kept")
    add_report(parser, "OUTPUT.json and .md")
    args = parser.parse_args()
    return run_program(args, lambda: make_report(args), markdown, markdown=True)


if __name__ == "__main__":
    raise SystemExit(main())
