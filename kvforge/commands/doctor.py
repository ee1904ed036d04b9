"""``kvforge doctor``: what this machine can do, and what is missing."""

import argparse
import json
from collections.abc import Sequence

from kvforge.commands.parsers import add_command, display_of
from kvforge.doctor.checks import diagnose
from kvforge.doctor.finding import EVERY_COMMAND, Check


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "doctor",
        help="check this machine: compiler, torch, Triton, ports, memory",
        example="kvforge doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="print every check as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what works and what is lacking, with -v every check; returns 1 if something needed to build and run
    engines is missing, or something that is installed is broken."""
    checks = diagnose()
    if args.json:
        print(json.dumps([check.__dict__ for check in checks], indent=1))
    else:
        shown = display_of(args)
        print("\n".join(whole(checks) if shown.verbose else summary(checks)))
        if not shown.verbose:
            shown.note("`kvforge doctor -v` prints every check.")
    return int(any(check.status in ("missing", "broken") for check in checks))


_MARKS = {"broken": "BROKEN ", "missing": "MISSING", "optional": "lacks  ", "ok": "ok     "}
"""Of each status, the worst first."""


def summary(checks: Sequence[Check]) -> list[str]:
    """Return a line for each fact of the machine, one for all that works, and one for each check that is not ok, the
    worst first: what is wrong, what needs it, and how to mend it."""
    facts = [f"{check.name}: {check.found}" for check in checks if check.status == "ok" and not check.needed_for]
    wrong = sorted((check for check in checks if check.status != "ok"), key=lambda check: [*_MARKS].index(check.status))
    lacking = {check.needed_for for check in wrong}
    uses = dict.fromkeys(check.needed_for for check in checks if check.needed_for)
    works = [] if EVERY_COMMAND in lacking else [use for use in uses if use not in lacking]
    return [*facts, *([f"{_MARKS['ok']}  {', '.join(works)}"] if works else []), *map(_line, wrong)]


def whole(checks: Sequence[Check]) -> list[str]:
    """Return a line for each check."""
    return [_line(check) for check in checks]


def _line(check: Check) -> str:
    use = f", for {check.needed_for}" if check.needed_for and check.status != "ok" else ""
    return f"{_MARKS[check.status]}  {check.name:<18} {check.found}{use}" + (
        f"  -> {check.advice}" if check.advice else ""
    )
