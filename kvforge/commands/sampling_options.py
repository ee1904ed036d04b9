"""Options of the commands that generate: how tokens are chosen and where a text ends."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvforge.commands.parsers import display_of
from kvforge.common.sampling_fields import (
    API_SAMPLING,
    AUTO,
    DEFAULT_FIELDS,
    GENERATION_CONFIGS,
    SAMPLING_FIELDS,
    SamplingField,
)

if TYPE_CHECKING:
    from kvforge.runtime.requests.defaults import SamplingDefaults

_OTHERS = tuple(name for name in API_SAMPLING if name not in DEFAULT_FIELDS)
"""Of each request."""


def add_default_options(parser: argparse._ActionsContainer) -> None:
    """Declare --generation-config and an option for each of DEFAULT_FIELDS."""
    parser.add_argument(
        "--generation-config",
        default=AUTO,
        choices=GENERATION_CONFIGS,
        help="auto: sample as the model's generation_config.json says where nobody does; none: as without that file",
    )
    for name in DEFAULT_FIELDS:
        _add_number(parser, SAMPLING_FIELDS[name])


def _add_number(parser: argparse._ActionsContainer, field: SamplingField) -> None:
    kind = type(field.neutral)
    default = None if field.is_default else field.neutral
    parser.add_argument(field.option, type=kind, default=default, metavar=field.metavar, help=field.about)


def sampling_defaults(args: argparse.Namespace, folder: Path) -> "SamplingDefaults":
    """What holds where a request does not say, of the engine whose tokenizer's files are in ``folder``.

    Raises:
        KvforgeError: an option or the model's file cannot be used.
    """
    from kvforge.runtime.requests.defaults import SamplingDefaults

    return SamplingDefaults.read(folder, args.generation_config, {name: getattr(args, name) for name in DEFAULT_FIELDS})


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Declare them; ``max_tokens`` is the default, None for what the context holds."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help="tokens at most" + ("" if max_tokens else " (default: what the context holds)"),
    )
    add_default_options(parser)
    for name in _OTHERS:
        _add_number(parser, SAMPLING_FIELDS[name])
    parser.add_argument(
        "--seed", type=int, default=None, metavar="N", help="make sampling repeatable (default: by chance)"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )
    parser.add_argument(
        "--bad-word",
        action="append",
        default=[],
        metavar="TEXT",
        dest="bad_words",
        help="never generate this text; may be given several times",
    )


def sampling_options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The arguments of ``SamplingParams`` that they say, ``max_tokens`` aside, for an engine whose tokenizer's files
    are in ``folder``. Notes what the model asks for."""
    defaults = sampling_defaults(args, folder).greedy_at_first()
    if defaults.model:
        display_of(args).note(f"sampling with {defaults}")
    return dict(
        **defaults.values,
        **{name: getattr(args, name) for name in _OTHERS},
        seed=args.seed,
        stop=args.stop,
        bad_words=args.bad_words,
    )
