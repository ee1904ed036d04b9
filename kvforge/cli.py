"""The ``kvforge`` command."""

import argparse
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from kvforge.commands.parsers import HelpFormatter, add_display_options, display_of
from kvforge.common.errors import KvforgeError
from kvforge.common.native_calls import panics_as
from kvforge.common.threads import set_threads
from kvforge.suggesting_parser import SuggestingParser, add_aliases
from kvforge.version import __version__

COMMANDS = (
    "plan",
    "rewire",
    "distill",
    "predict",
    "quantize",
    "build",
    "inspect",
    "generate",
    "chat",
    "serve",
    "cache",
    "bench",
    "eval",
    "lm_eval",
    "demo",
    "plugins",
    "doctor",
    "completion",
)
"""Modules of ``kvforge.commands``, in the order of ``--help``."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = SuggestingParser(
        prog="kvforge",
        description=(
            "Compile KV-compressed language models into engines and serve them behind Triton Inference Server."
        ),
        epilog="example:\n  kvforge build CHECKPOINT -o ENGINE && kvforge serve ENGINE",
        formatter_class=HelpFormatter,
    )
    add_display_options(parser)
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="version", version=f"kvforge {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"kvforge.commands.{name}").add_parser(subparsers)
    add_aliases(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. A KvforgeError is printed as one line and gives 1, and so is an
    error of the operating system; with -v where it comes from stands before it."""
    verbose = False
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer goes on where the terminal has no such letter
    try:
        parser = make_parser()
        if not (sys.argv[1:] if argv is None else argv):
            parser.print_help(sys.stderr)
            return 2
        args = parser.parse_args(argv)
        verbose = args.verbose
        if verbose:
            logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        set_threads(getattr(args, "threads", None))
        panics = panics_as(KvforgeError, "a library failed on this input; the lines above say where.")
        with panics, display_of(args).checkpoint_warnings():
            code = int(args.run(args))
        sys.stdout.flush()
        return code
    except KvforgeError as error:
        if verbose:
            traceback.print_exc()
        print(f"kvforge: error: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if type(error).__module__ != "plugins.errors":  # whose import is what failed
            raise
        print(f"kvforge: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvforge: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Nobody reads the output any more; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if verbose:
            traceback.print_exc()
        print(f"kvforge: error: {error}.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
