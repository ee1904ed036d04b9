"""``kvforge lm-eval``: tasks of lm-evaluation-harness on an engine, by default the SwiftKV paper's seven."""

import argparse
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("lm-eval", help="score an engine on tasks of lm-evaluation-harness")
    parser.add_argument("engine", type=Path, help="engine directory")
    parser.add_argument(
        "--tasks",
        metavar="NAME,...",
        help="the paper's arc-challenge, winogrande, hellaswag, truthfulqa, mmlu, mmlu-cot and gsm8k (default: these "
        "seven), or any task of lm-evaluation-harness as it is defined there",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="documents of each (sub)task at most (default: all)")
    parser.add_argument("--include-path", type=Path, metavar="DIR", help="directory with task definitions of your own")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the scores. Raises KvforgeError for an unknown task or a data set that is not there."""
    from kvforge.errors import KvforgeError
    from kvforge.evaluation.lm_run import run_paper_tasks, score_table

    if args.limit is not None and args.limit < 1:
        raise KvforgeError(f"--limit is {args.limit}; give 1 or more.")
    if args.include_path is not None and not args.include_path.is_dir():
        raise KvforgeError(f"--include-path {args.include_path} is not a directory; check the path.")
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    tasks = None if args.tasks is None else [name for name in args.tasks.split(",") if name]
    scores = run_paper_tasks(args.engine, tasks, args.limit, args.include_path)
    if args.json:
        print(json.dumps({"engine": str(args.engine), "scores": [asdict(score) for score in scores]}, indent=2))
    else:
        print(score_table(scores))
    return 0
