"""``kvforge doctor``: what this machine can do, and what is missing."""

import argparse
import json

from kvforge.commands.parsers import add_command
from kvforge.doctor.checks import diagnose

_MARKS = {"ok": "ok     ", "optional": "absent ", "missing": "MISSING", "broken": "BROKEN "}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "doctor",
        help="check this machine: compiler, torch, Triton, ports, memory",
        example="kvforge doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print every check; returns 1 if something needed to build and run engines is missing, or
    something that is installed is broken."""
    checks = diagnose()
    if args.json:
        print(json.dumps([check.__dict__ for check in checks], indent=1))
    else:
        for check in checks:
            print(
                f"{_MARKS[check.status]}  {check.name:<18} {check.found}"
                + (f"  -> {check.advice}" if check.advice else "")
            )
    return int(any(check.status in ("missing", "broken") for check in checks))
