"""What programs that measure share: what a report begins with, and how it is made, shown and kept."""

import argparse
import json
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.common.figures import check_figure
from model_defs import ModelError
from perf.harness.files import check_place, write_report
from perf.harness.machine import describe_machine, describe_threads

Report = dict[str, Any]


def make_parser(doc: str | None, *options: Callable[[argparse.ArgumentParser], Any]) -> argparse.ArgumentParser:
    """Return the parser of a program, whose own text is shown by ``--help``, with what ``options`` declare."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for declare in options:
        declare(parser)
    return parser


def command_line(program: str, arguments: Sequence[str] | None = None) -> str:
    """Return the command line of the module ``program``, as it was given or with ``arguments``."""
    return shlex.join(["python", "-m", program, *(sys.argv[1:] if arguments is None else arguments)])


def begin_report(program: str, arguments: Sequence[str] | None = None) -> Report:
    """Return the command line of the module ``program``, and the machine."""
    return {"command": command_line(program, arguments), "machine": describe_machine()}


def begin_dated_report(program: str, arguments: Sequence[str] | None = None) -> Report:
    """As ``begin_report``, with the date apart and torch's threads."""
    return {
        "command": command_line(program, arguments),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_threads(),
    }


def run_program(
    args: argparse.Namespace,
    make: Callable[[], Report | None],
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
        if report is None:  # something else was asked for
            return 0
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
