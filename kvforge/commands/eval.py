"""`kvforge eval ENGINE`: exact match of an engine's greedy answers on the synthetic text tasks."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the `eval` sub-command."""
    parser = subparsers.add_parser("eval", help="score an engine on retrieval, recall and arithmetic tasks")
    parser.add_argument("engine", type=Path, help="engine directory of a model trained on these tasks")
    parser.add_argument("--task", action="append", help="task to run, may be repeated (default: all of them)")
    parser.add_argument("--num-prompts", type=int, default=200, help="prompts per task (default 200)")
    parser.add_argument("--length", type=int, default=1000, help="prompt length in tokens (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the scores. Raises KvforgeError for an unknown task or an impossible length."""
    from kvforge.errors import KvforgeError
    from kvforge.evaluation import evaluate, score_table
    from kvforge.evaluation.engine import EngineGenerator
    from kvforge.tasks import TASKS

    names = args.task or list(TASKS)
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise KvforgeError(f"unknown task {unknown[0]!r}; choose from {', '.join(TASKS)}")
    if args.num_prompts < 1:
        raise KvforgeError("--num-prompts must be at least 1")
    generator = EngineGenerator(args.engine, args.length, show_progress=not args.json)
    try:
        scores = [
            evaluate(name, args.length, args.num_prompts, args.seed, generator.count_tokens, generator)
            for name in names
        ]
    except ValueError as error:
        raise KvforgeError(str(error)) from error
    if args.json:
        print(json.dumps({"engine": str(args.engine), "scores": [asdict(score) for score in scores]}, indent=2))
    else:
        print(score_table(scores))
    return 0
