"""What the parsers of all commands have in common."""

import argparse
import re
import textwrap
from pathlib import Path
from typing import Any

from kvforge.common.display import Display
from kvforge.foreign_options import ALWAYS_ON
from kvforge.suggesting_parser import aliases_of

_DEFAULT = re.compile(r"(.*?)( \(default: (?:[^()]|%\(default\)s)+\))?", re.DOTALL)
"""A help, and what it says of its default."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Says what an option is when it is not given, ``(default: X)``, which a help that knows better has already, and
    how other programs spell it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        help, aliases = self._with_default(action), aliases_of(action)
        if not help or not aliases:
            return help
        text, default = _DEFAULT.fullmatch(help).groups("")  # type: ignore[union-attr]  # it matches any text
        return f"{text} [also {', '.join(aliases)}]{default}"

    def _with_default(self, action: argparse.Action) -> str | None:
        is_plain = isinstance(action.default, (str, int, float, Path)) and not isinstance(action.default, bool)
        if not is_plain or action.default is argparse.SUPPRESS or "(default: " in (action.help or ""):
            return action.help
        shown = f"{action.default:g}" if isinstance(action.default, float) else "%(default)s"
        return f"{action.help} (default: {shown})"

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Lines break between words alone, so that names with hyphens can be copied."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


def add_command(
    subparsers: argparse._SubParsersAction, name: str, *, help: str, example: str, description: str | None = None
) -> argparse.ArgumentParser:
    """Declare a command: ``help`` is its line in the list of commands and, as a sentence, the head of its own help
    where there is no ``description``; ``example`` is a whole command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=help,
        description=textwrap.fill(description or f"{help[0].upper()}{help[1:]}.", 100),
        epilog=f"example:\n  {example}",
        formatter_class=HelpFormatter,
    )
    add_display_options(parser, argparse.SUPPRESS)
    return parser


def add_display_options(parser: argparse.ArgumentParser, default: Any = False) -> None:
    """Declare -v and -q, which stand before a command or after it."""
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        default=default,
        help="say what is done, and where errors come from",
    )
    parser.add_argument("-q", "--quiet", action="store_true", default=default, help="show neither progress nor notes")


def display_of(args: argparse.Namespace) -> Display:
    """Return what -v and -q ask for."""
    return Display(args.quiet, args.verbose)


def add_checkpoint(parser: argparse.ArgumentParser, name: str, *, help: str, **more: Any) -> None:
    """Declare the positional argument ``name``, a checkpoint, and --revision."""
    parser.add_argument(name, help=f"{help}; or OWNER/NAME[@REVISION] on the Hub", **more)
    add_revision(parser)


def add_threads(parser: argparse._ActionsContainer) -> None:
    """Declare --threads, which ``main`` heeds."""
    parser.add_argument(
        "--threads", type=int, metavar="N",
        help="of arithmetic (default: $OMP_NUM_THREADS, else the cores that this process and its container may use)",
    )  # fmt: skip


def add_kv_cache(parser: argparse._ActionsContainer) -> None:
    """Declare --kv-cache-gib."""
    parser.add_argument(
        "--kv-cache-gib", type=float, metavar="GIB",
        help="memory of the KV cache (default: on a CPU a quarter of what is free, at most 4; on a GPU what is left)",
    )  # fmt: skip


def add_always_on(exclusive: argparse._ActionsContainer, parser: argparse._ActionsContainer) -> None:
    """Declare the switches that ask for what a server does in any case, unless that is switched off: ``exclusive`` has
    the option that does so of the first two."""
    for index, name in enumerate(ALWAYS_ON):
        place = exclusive if index < 2 else parser
        place.add_argument(name, action="store_true", dest="always_on", help=argparse.SUPPRESS)


def add_calibration(parser: argparse.ArgumentParser, use: str, num_samples: int) -> None:
    """Declare --calibration, a text of which ``use`` says what for, and how much of it is read."""
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help=f"UTF-8 text to {use} (default: generated text)"
    )
    parser.add_argument("--num-samples", type=int, default=num_samples, metavar="N", help="sequences of it")
    parser.add_argument("--num-tokens", type=int, default=512, metavar="N", help="tokens of a sequence")


def add_force(parser: argparse.ArgumentParser, note: str = "") -> None:
    """Declare --force of a command that writes a checkpoint; ``note`` says what it leaves as it is."""
    parser.add_argument(
        "--force", action="store_true", help=f"replace an existing checkpoint, when the new one is whole{note}"
    )


def add_revision(parser: argparse._ActionsContainer) -> None:
    """Declare --revision."""
    parser.add_argument(
        "--revision", metavar="REV", help="branch, tag or commit of a checkpoint on the Hub (default: its main branch)"
    )


def checkpoint_of(args: argparse.Namespace, name: str | Path, draft_head: str | None = None) -> Path:
    """Return the directory or file of the checkpoint ``name``, downloaded if it is one of the Hub, and note what of it
    is left out, beside the module that ``draft_head`` may name; raises CheckpointError, of a name that is none before
    torch is imported."""
    from kvforge.common.errors import CheckpointError
    from kvforge.hub import find_checkpoint

    path = find_checkpoint(name, args.revision, show_progress=display_of(args).bars)
    if not path.exists():
        raise CheckpointError(
            f"{name} does not exist: give a directory with config.json and *.safetensors, a GGUF file, or OWNER/NAME "
            "on the Hub."
        )
    from kvforge.checkpoint.mtp_head import MTP
    from kvforge.checkpoint.text_part import what_is_left_out

    if (sentence := what_is_left_out(path, draft_head == MTP)) is not None:
        display_of(args).note(sentence)
    return path
