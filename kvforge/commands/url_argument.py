"""The URL of an OpenAI-compatible server in place of an engine."""

import argparse
import os
from collections.abc import Collection
from pathlib import Path

from kvforge.common.errors import KvforgeError
from kvforge.gateway.http.auth import ENVIRONMENT
from kvforge.remote.server import SCHEMES, RemoteServer
from kvforge.suggesting_parser import commands_of

ENVIRONMENTS = (ENVIRONMENT, "OPENAI_API_KEY")
_OF_ALL = ("verbose", "quiet", "model", "api_key")


def place(text: str) -> str | Path:
    """A URL as it is, all else as a path."""
    return text if text.startswith(SCHEMES) else Path(text)


def is_url(engine: str | Path) -> bool:
    """Whether the argument names a server."""
    return isinstance(engine, str)


def add_url_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declare them; returns their group."""
    group = parser.add_argument_group("server", "for the URL of an OpenAI-compatible server in place of an engine")
    group.add_argument("--model", metavar="NAME", help="of that server (default: the first in its /v1/models)")
    group.add_argument("--api-key", metavar="KEY", help=f"of that server (default: ${', $'.join(ENVIRONMENTS)})")
    return group


def given(args: argparse.Namespace) -> dict[str, str]:
    """What is not as it is by default: the option of each name."""
    actions = commands_of(args.parser)[args.command]._actions
    return {
        action.dest: action.option_strings[0]
        for action in actions
        if action.option_strings and getattr(args, action.dest, action.default) != action.default
    }


def check_for_url(args: argparse.Namespace, known: Collection[str]) -> None:
    """Raise KvforgeError for an option that no request can say; ``known`` are those that one can."""
    for name, option in given(args).items():
        if name not in known and name not in _OF_ALL:
            raise KvforgeError(f"{option} is for an engine that this command runs, not for a URL; leave it out.")


def check_for_engine(args: argparse.Namespace, others: Collection[str] = ()) -> None:
    """Raise KvforgeError for --model, --api-key and ``others``."""
    for name, option in given(args).items():
        if name in ("model", "api_key", *others):
            raise KvforgeError(f"{option} is for the URL of a server, and {args.engine} is none; leave it out.")


def server_of(args: argparse.Namespace) -> RemoteServer:
    """Return the server, not yet asked. Raises KvforgeError."""
    keys = (args.api_key, *map(os.environ.get, ENVIRONMENTS))
    return RemoteServer(args.engine, next((key.strip() for key in keys if key and key.strip()), None))
