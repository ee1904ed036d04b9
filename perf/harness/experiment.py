"""A program that measures, as a declaration: its options, what it finds, and how that is shown, drawn and kept."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.harness.command import Report, begin_dated_report, begin_report, make_parser, run_program
from perf.harness.files import merge_rows, read_json
from perf.harness.options import (
    BUILD_ONLY,
    CHOSEN_WORKLOADS,
    RESUME,
    REUSE,
    STREAM_INTERVALS,
    Option,
    chosen,
    engine_place,
    engine_problem,
    flag,
    lengths,
    levels,
    named,
    number,
    numbers,
    option,
    output,
    place,
    positive,
    positive_float,
    seed,
    several,
    work,
)
from perf.harness.tables import Row, columns_table, interval, spread, text_table

__all__ = [
    "BUILD_ONLY", "CHOSEN_WORKLOADS", "RESUME", "REUSE", "STREAM_INTERVALS", "Experiment", "Report", "Row", "chosen",
    "columns_table", "engine_place", "engine_problem", "flag", "interval", "lengths", "levels", "named", "number",
    "numbers", "option", "output", "place", "positive", "positive_float", "ratio", "seed", "several", "spread", "told",
    "work",
]  # fmt: skip
"""Also what a declaration is made of."""


@dataclass(frozen=True)
class Experiment:
    """``module`` is run by ``python -m``, ``doc`` is its text, which ``--help`` shows. ``check`` says in a sentence
    what of the options cannot be; ``instead`` does what some ask for in place of measuring, and says whether they did.

    ``measure`` returns what the report has behind the command, the machine and the options named by ``settings``: its
    fields, or its rows alone. Rows of an earlier run in OUTPUT.json stay where none with the same ``merged`` keys is
    new. A report is shown as a paragraph each of ``title``, command and machine, ``notes`` (of a string the fields of
    the report take their places) and a table of the rows, whose ``columns``, as ``Column`` has them, may depend on the
    report; as plain columns with neither title nor notes where it ``is_plain``; or as ``shown`` has it. It is kept as
    JSON, as Markdown unless ``is_plain``, and as ``plot`` draws it, with the ending ``figure``; or as ``keep`` does it.
    The exit status is 1 where it has ``failed``.
    """

    module: str
    doc: str | None
    options: Sequence[Option]
    measure: Callable[[argparse.Namespace], Mapping[str, Any] | Iterable[Row]]
    settings: Sequence[str] = ()
    merged: Sequence[str] = ()
    title: str = ""
    notes: str | Callable[[Report], str] = ""
    columns: Sequence[Sequence[Any]] | Callable[[Report], Sequence[Sequence[Any]]] = ()
    align: str = ""
    shown: Callable[[Report], str] | None = None
    is_plain: bool = False
    is_dated: bool = False
    plot: Callable[[Report, Path], None] | None = None
    figure: str = ".svg"
    keep: Callable[[Path, Report], None] | None = None
    failed: Callable[[Report], Any] | None = None
    check: Callable[[argparse.Namespace], str | None] | None = None
    instead: Callable[[argparse.Namespace], bool] | None = None

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the command line."""
        parser = make_parser(self.doc, *self.options)
        args = parser.parse_args(arguments)
        if self.check is not None and (problem := self.check(args)):
            parser.error(problem)
        return args

    def report(self, args: argparse.Namespace, arguments: Sequence[str] | None = None) -> Report:
        """Measure; returns the report, which says that ``arguments`` were given (default: the command line's)."""
        found = self.measure(args)
        found = dict(found) if isinstance(found, dict) else {"rows": list(found)}
        if self.merged and args.output:
            old = read_json(args.output.with_suffix(".json"), {"rows": []})["rows"]
            found["rows"] = merge_rows(old, found["rows"], self.merged)
        begin = begin_dated_report if self.is_dated else begin_report
        settings = {name: getattr(args, name) for name in self.settings}
        return begin(self.module, arguments) | settings | found

    def show(self, report: Report) -> str:
        """Return the report for a reader."""
        if self.shown is not None:
            return self.shown(report)
        rows = report["rows"]
        if isinstance(rows, dict):
            rows = [{"name": name, **row} for name, row in rows.items()]
        columns = self.columns(report) if callable(self.columns) else self.columns
        if self.is_plain:
            return text_table(columns, rows)
        notes = self.notes(report) if callable(self.notes) else self.notes.format_map(report)
        parts = [f"# {self.title}" if self.title else "", told(report), notes, columns_table(columns, rows, self.align)]
        return "\n\n".join(filter(None, parts)) + "\n"

    def run(self, arguments: Sequence[str] | None = None) -> int:
        """Measure as the command line says, print and keep the report; returns the exit status."""
        args = self.parse(arguments)
        how = {"plot": self.plot, "figure": self.figure, "keep": self.keep, "failed": self.failed}

        def make() -> Report | None:
            return None if self.instead is not None and self.instead(args) else self.report(args, arguments)

        return run_program(args, make, self.show, markdown=not self.is_plain, **how)


def told(report: Report) -> str:
    """Return what a report was made with: its command, the day where that stands apart, and the machine."""
    parts = (f"`{report['command']}`", report.get("date"), report.get("machine"))
    return ", ".join(filter(None, parts)) + "."


def ratio(over: str, under: str) -> Callable[[Row], float]:
    """Return the value of a column that is one number of a row over another one."""
    return lambda row: row[over] / row[under]
