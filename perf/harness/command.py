"""What programs that measure share: options, what a report begins with, and how it is made, shown and kept."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvforge.errors import KvforgeError
from perf.harness.files import check_place, write_report
from perf.harness.machine import describe_machine
from perf.serving.load.engines import WORK

Report = dict[str, Any]


def positive(text: str) -> int:
    """The type of a number that a program needs at least one of."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def positive_float(text: str) -> float:
    """As ``positive``, above zero."""
    if not (number := float(text)) > 0:  # NaN too
        raise argparse.ArgumentTypeError(f"{number:g} is not above 0")
    return number


def add_lengths(parser: argparse.ArgumentParser, input_tokens: int, output_tokens: int) -> None:
    """Declare the lengths of requests, with these defaults."""
    parser.add_argument("--input-tokens", type=positive, default=input_tokens)
    parser.add_argument("--output-tokens", type=positive, default=output_tokens)


def add_levels(
    parser: argparse.ArgumentParser, concurrency: list[int], min_requests: int, kv_cache_gib: float, waves: bool = True
) -> None:
    """Declare the levels of load that a server gets one after the other, with these defaults."""
    parser.add_argument("--concurrency", type=positive, nargs="*", default=concurrency)
    parser.add_argument("--min-requests", type=positive, default=min_requests, help="of a level (default %(default)s)")
    if waves:
        parser.add_argument("--waves", type=positive_float, default=3, help="requests per concurrency (default 3)")
    parser.add_argument("--kv-cache-gib", type=positive_float, default=kv_cache_gib)
    parser.add_argument("--timeout-s", type=positive_float, default=300.0, help="per level (default 300)")


def add_report(parser: argparse.ArgumentParser, files: str) -> None:
    """Declare where a report goes, of which ``files`` says what is written."""
    parser.add_argument("--output", type=Path, help=f"write {files}")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def add_work(parser: argparse.ArgumentParser) -> None:
    """Declare where engines are kept."""
    parser.add_argument("--work", type=Path, default=WORK, help="engines, built once and kept (default: %(default)s)")


def begin_report(program: str) -> Report:
    """Return the command line, as it was given to the module ``program``, and the machine."""
    return {"command": " ".join([f"python -m {program}", *sys.argv[1:]]), "machine": describe_machine()}


def run_program(
    args: argparse.Namespace,
    make: Callable[[], Report],
    show: Callable[[Report], str],
    keep: Callable[[Path, Report], None] = write_report,
) -> Report | None:
    """Make the report, print it and keep it where ``--output`` says; None, after one sentence, where one of these
    fails."""
    try:
        if args.output:
            check_place(args.output)  # it may take hours until there is something to write
        report = make()
        print(json.dumps(report, indent=1) if args.json else show(report))
        if args.output:
            keep(args.output, report)
    except KvforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    return report


def run_markdown_program(
    args: argparse.Namespace, make: Callable[[], Report], markdown: Callable[[Report], str]
) -> Report | None:
    """As ``run_program``, for a report that is shown and kept as markdown."""
    return run_program(args, make, markdown, lambda stem, report: write_report(stem, report, markdown(report)))
