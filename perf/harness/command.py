"""What programs that measure share: options, what a report begins with, and how it is made, shown and kept."""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.common.figures import check_figure
from model_defs import ModelError
from perf.harness.engines import WORK
from perf.harness.files import check_place, write_report
from perf.harness.machine import describe_machine, describe_threads

Report = dict[str, Any]


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program, whose own text is shown by ``--help``."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


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


def add_stream_intervals(parser: argparse.ArgumentParser) -> None:
    """Declare how many tokens a response of a stream has: a server for each number."""
    told = "tokens in a response of a stream, 0 for all that wait (default 1)"
    parser.add_argument("--stream-interval", type=int, nargs="+", default=[1], metavar="N", help=told)


def label_interval(name: str, interval: int) -> str:
    """``name`` in a table, with the number of tokens in a response unless that is one."""
    return name if interval == 1 else f"{name}, {f'{interval} tokens' if interval else 'all that wait'} in a response"


def add_report(
    parser: argparse.ArgumentParser, files: str, default: str | Path | None = None, as_json: bool = True
) -> None:
    """Declare where a report goes, of which ``files`` says what is written, and with ``as_json`` how it is printed."""
    place = None if default is None else Path(default)
    told = f"write {files}" + (" (default OUTPUT: %(default)s)" if default else "")
    parser.add_argument("--output", type=Path, default=place, help=told)
    if as_json:
        parser.add_argument("--json", action="store_true", help="print the report as JSON")


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Declare how a run that was ended goes on, and when this one ends."""
    parser.add_argument("--append", action="store_true", help="go on with OUTPUT.jsonl")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing after this time")


def add_work(
    parser: argparse.ArgumentParser, default: str | Path = WORK, what: str = "engines, built once and kept"
) -> None:
    """Declare where engines, and whatever else takes long to make, are kept."""
    parser.add_argument("--work", type=Path, default=Path(default), help=f"{what} (default: %(default)s)")


def command_line(program: str, arguments: list[str] | None = None) -> str:
    """Return the command line of the module ``program``, as it was given or with ``arguments``."""
    return " ".join([f"python -m {program}", *(sys.argv[1:] if arguments is None else arguments)])


def begin_report(program: str, arguments: list[str] | None = None) -> Report:
    """Return the command line of the module ``program``, and the machine."""
    return {"command": command_line(program, arguments), "machine": describe_machine()}


def begin_dated_report(program: str) -> Report:
    """As ``begin_report``, with the date apart and torch's threads."""
    return {"command": command_line(program), "date": time.strftime("%Y-%m-%d"), "machine": describe_threads()}


def run_program(
    args: argparse.Namespace,
    make: Callable[[], Report],
    show: Callable[[Report], str],
    *,
    markdown: bool = False,
    plot: Callable[[Report, Path], None] | None = None,
    figure: str = ".svg",
    keep: Callable[[Path, Report], None] | None = None,
    failed: Callable[[Report], Any] | None = None,
) -> int:
    """Make the report, print it, and keep it where ``--output`` says: as JSON, with ``markdown`` also as it is shown,
    and drawn by ``plot`` with the ending ``figure``; or as ``keep`` does it.

    Returns the exit status: 1, after one sentence, where one of these fails, and where the report has ``failed``.
    """
    output: Path | None = args.output
    try:
        if output:
            check_place(output)  # it may take hours until there is something to write
            if plot is not None:
                check_figure(output.with_suffix(figure))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.export's own
            report = make()
        print(json.dumps(report, indent=1) if getattr(args, "json", False) else show(report))
        if output and keep is not None:
            keep(output, report)
        elif output:
            write_report(output, report, show(report) if markdown else None)
        if output and plot is not None:
            plot(report, output.with_suffix(figure))
    except (KvforgeError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(bool(failed is not None and failed(report)))


def run_main(main: Callable[[], Any]) -> int:
    """Call a program that keeps its reports itself; returns its exit status: 1, after one sentence, where it fails."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch.export's own
    try:
        return int(main() or 0)
    except (KvforgeError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
