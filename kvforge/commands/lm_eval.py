"""``kvforge lm-eval``: tasks of lm-evaluation-harness on an engine, by default the SwiftKV paper's seven."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from kvforge.commands.parsers import add_command, display_of


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "lm-eval",
        help="score an engine on tasks of lm-evaluation-harness",
        example="kvforge lm-eval ENGINE --tasks arc-challenge,gsm8k --limit 100",
    )
    parser.add_argument("engine", type=Path, help="engine directory")
    parser.add_argument(
        "--tasks",
        metavar="NAME,...",
        help="the paper's arc-challenge, winogrande, hellaswag, truthfulqa, mmlu, mmlu-cot and gsm8k, or any task of "
        "lm-evaluation-harness as it is defined there (default: the paper's seven)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="documents of each (sub)task at most (default: all)")
    parser.add_argument("--include-path", type=Path, metavar="DIR", help="directory with task definitions of your own")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the scores. Raises KvforgeError for an unknown task or a data set that is not there."""
    display = display_of(args)
    show = display.bars and not args.json
    if not show:
        os.environ.setdefault("TQDM_DISABLE", "1")  # the harness's own bars; tqdm reads it when it is imported

    from kvforge.common.errors import KvforgeError
    from kvforge.evaluation.lm_run import LmScore, run_paper_tasks, score_table

    if args.limit is not None and args.limit < 1:
        raise KvforgeError(f"--limit is {args.limit}; give 1 or more.")
    if args.include_path is not None and not args.include_path.is_dir():
        raise KvforgeError(f"--include-path {args.include_path} is not a directory; check the path.")
    tasks = None if args.tasks is None else [name.strip() for name in args.tasks.split(",") if name.strip()]
    if tasks == []:
        raise KvforgeError("--tasks names no task; leave it out for the paper's seven.")
    scores: list[LmScore] = []
    try:
        for score in run_paper_tasks(args.engine, tasks, args.limit, args.include_path, show):
            scores.append(score)
            if not show:
                display.note(f"{score.name}: {score.metric} {score.value:.3f}")
    finally:  # the scores of tasks before one that fails, hours of work perhaps, are printed too
        if scores and args.json:
            print(json.dumps({"engine": str(args.engine), "scores": [asdict(score) for score in scores]}, indent=2))
        elif scores:
            print(score_table(scores))
    return 0
