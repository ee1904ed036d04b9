"""`kvforge demo`: from two small checkpoints to streamed answers over a real Triton server, side by side."""

import argparse
from pathlib import Path

from kvforge.commands.parsers import add_command

MODELS = Path(__file__).resolve().parents[2] / "model_defs" / "assets"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "demo",
        help="build and serve a teacher and its SwiftKV student, and compare them",
        example="kvforge demo --num-questions 12",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path(".demo"), help="where engines go")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of tiny-teacher and tiny-swiftkv")
    parser.add_argument("--num-questions", type=int, default=24, help="retrieval questions")
    parser.add_argument("--concurrency", type=int, default=4, help="answers streamed at once")
    parser.add_argument("--seed", type=int, default=7, help="of the questions")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when both models reached their accuracy and streamed what they answer offline."""
    from kvforge.common.errors import KvforgeError
    from kvforge.demo.run import run_demo

    if args.num_questions < 1 or args.concurrency < 1:
        raise KvforgeError("--num-questions and --concurrency must be at least 1")
    good = run_demo(args.models, args.output, args.num_questions, args.concurrency, args.seed)
    return 0 if good else 1
