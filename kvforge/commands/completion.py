"""``kvforge completion``: a script with which a shell completes kvforge's command line."""

import argparse

from kvforge.commands.parsers import add_command


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    from kvforge.completion.scripts import SHELLS

    parser = add_command(
        subparsers,
        "completion",
        help="print a script that completes commands and options in a shell",
        example="kvforge completion bash",
    )
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell that reads the script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script for ``args.parser``, which has all commands."""
    from kvforge.completion.scripts import SHELLS
    from kvforge.completion.tree import commands_of

    print(SHELLS[args.shell](commands_of(args.parser)), end="")
    return 0
