"""``kvforge eval ENGINE``: exact match on the synthetic text tasks, perplexity, and closeness to a teacher engine."""

import argparse
import json
from pathlib import Path

from kvforge.commands.parsers import add_command, display_of


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "eval",
        help="score an engine on text tasks, by perplexity and against a teacher",
        example="kvforge eval engines/student --teacher engines/teacher --task needle_single --length 1000",
    )
    parser.add_argument("engine", type=Path, help="engine directory; tasks suit models trained on such text")
    parser.add_argument(
        "--task", action="append", help="task to run, may be repeated; none: no tasks (default: all but chains)"
    )
    parser.add_argument("--num-prompts", type=int, default=200, help="prompts per task")
    parser.add_argument("--length", type=int, default=1000, help="tokens of a prompt or document")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts, documents and resamples (default: 0)")
    parser.add_argument(
        "--teacher",
        metavar="ENGINE",
        default="none",
        help="engine to compare with: KL, agreement, paired differences",
    )
    parser.add_argument(
        "--perplexity",
        metavar="FILE",
        help="documents: a UTF-8 text, or 'generated' (default: generated, where --teacher or --early-exit needs some)",
    )
    parser.add_argument("--num-documents", type=int, default=32, metavar="N", help="documents at most")
    parser.add_argument(
        "--early-exit",
        nargs="?",
        const="documents",
        choices=("documents", "answers"),
        help="also how often the engine's early exit agrees with its full model, on the documents or on the engine's "
        "own answers to the tasks; without a value on the documents",
    )
    parser.add_argument(
        "--early-exit-threshold",
        type=float,
        metavar="P",
        help="also answer the tasks with generated tokens leaving at the early exit where its probability is above P "
        "(the paper's: 0.95), and compare answers",
    )
    parser.add_argument(
        "--early-exit-prompts",
        action="store_true",
        help="with --early-exit-threshold: answer them once more with the last tokens of prompts leaving there too",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="figure of the tasks; FILE-early-exit with --early-exit (.png, .svg, .pdf)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report. Raises KvforgeError for an unknown task, an impossible length or a teacher that is none."""
    from kvforge.common.errors import KvforgeError
    from kvforge.common.figures import check_figure
    from kvforge.evaluation.early_exit import plot_alignment
    from kvforge.evaluation.report import describe, plot_report
    from kvforge.evaluation.run import GENERATED, EvalOptions, run_evaluation
    from kvforge.tasks import DEFAULT_TASKS

    teacher = None if args.teacher == "none" else Path(args.teacher)
    tasks = tuple(args.task or DEFAULT_TASKS) if args.task != ["none"] else ()
    documents = args.perplexity or (GENERATED if teacher is not None or args.early_exit == "documents" else None)
    if args.plot and not (tasks or args.early_exit):
        raise KvforgeError("--plot shows tasks and the early exit; run one of them or leave it out")
    if args.plot:
        check_figure(args.plot)
    options = EvalOptions(
        tasks,
        args.num_prompts,
        args.length,
        args.seed,
        documents,
        args.num_documents,
        args.early_exit,
        args.early_exit_threshold,
        args.early_exit_prompts,
    )
    report = run_evaluation(args.engine, teacher, options, use_tqdm=not args.json and not display_of(args).quiet)
    print(json.dumps(report.to_json(), indent=2) if args.json else describe(report), flush=True)
    if args.plot and report.scores:
        plot_report(report, args.plot)
    if args.plot and report.early_exit is not None:
        plot_alignment(report.early_exit, args.plot.with_stem(f"{args.plot.stem}-early-exit"))
    return 0
