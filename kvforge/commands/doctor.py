"""``kvforge doctor``: what this machine can do, and what is missing."""

import argparse
import json

from kvforge.commands.parsers import add_command, display_of
from kvforge.doctor.checks import diagnose
from kvforge.doctor.report import summary, whole


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
