"""The OpenAI gateway of `kvforge serve`: its options, and whether there is one."""

import argparse
import os
from pathlib import Path
from typing import Any

from kvforge.commands.sampling_options import add_default_options
from kvforge.commands.serve_doors import Doors
from kvforge.common.errors import KvforgeError
from kvforge.common.sampling_fields import AUTO, DEFAULT_FIELDS
from kvforge.engine_cache.names import names_checkpoint
from kvforge.gateway.http.auth import ENVIRONMENT
from kvforge.gateway.options import GatewayOptions, add_option, option_of
from kvforge.manifest import MANIFEST_FILE, TOKENIZER_DIR, Manifest, load_manifest
from kvforge.serving.server.ports import PORTS

LIMITS = (
    "cors_origin", "max_body_bytes", "max_answer_bytes", "max_requests", "max_connections", "max_n", "max_prompts",
    "max_stop", "request_timeout", "header_timeout", "body_timeout", "write_timeout", "keep_alive",
)  # fmt: skip
"""Fields of GatewayOptions that are options of the same name."""
_SHARED = (
    "chat_template", "tool_call_format", "reasoning_format", "generation_config", "api_key_file", "no_page",
    "max_seq_len", "drain_timeout", "log_format", "log_level",
)  # fmt: skip
"""Others that are, some of them options of the server or of engines too."""
_OWN = (
    "openai_address", "api_key_file", "api_key", "served_model_name", "chat_template", "tool_call_format",
    "reasoning_format", "no_page", "open_page", *DEFAULT_FIELDS,
)  # fmt: skip
OF_GATEWAY: dict[str, Any] = {
    "openai_port": PORTS["openai"],
    "generation_config": AUTO,
    **dict.fromkeys(_OWN),
    **{name: getattr(GatewayOptions, name) for name in LIMITS},
}
"""Options of the gateway alone, and what they are where nobody gives them; None and False are so of any."""


def add_gateway_options(parser: argparse.ArgumentParser) -> None:
    """Declare --openai and what goes with it."""
    gateway = parser.add_argument_group("OpenAI API", "a gateway in front of the server")
    gateway.add_argument(
        "--openai", action=argparse.BooleanOptionalAction,
        help="serve OpenAI's HTTP API too (default: where the engine has a tokenizer and streams)",
    )  # fmt: skip
    keys = gateway.add_mutually_exclusive_group()
    keys.add_argument(
        "--api-key-file", type=Path, help="keys that clients must have, one per line; $KVFORGE_API_KEY adds one"
    )
    keys.add_argument(
        "--api-key", metavar="KEY", help="the same of one key, which other users of this machine can see here"
    )
    gateway.add_argument(
        "--served-model-name", nargs="+", action="extend", metavar="NAME",
        help="what clients call the model; answers have the name that was asked for (default: its folder or name on "
        "the Hub)",
    )  # fmt: skip
    for name in ("chat_template", "tool_call_format", "reasoning_format"):
        add_option(gateway, name)
    add_default_options(gateway)
    page = gateway.add_mutually_exclusive_group()
    page.add_argument("--no-page", action="store_true", help="serve no page at the gateway's root")
    page.add_argument("--open-page", action="store_true", help="open that page in a browser once the server is ready")
    for name in LIMITS:
        add_option(gateway, name, metavar="N")


def choose_gateway(args: argparse.Namespace) -> str | None:
    """Decide whether there is a gateway, as ``args.openai``; returns why not, where nobody said so. A key of the
    command line is in the environment afterwards.

    Raises KvforgeError where its options are given and there is none, one of them is out of its range, or a gateway is
    asked for and cannot be.
    """
    streams = is_decoupled(args, load_manifest(args.engine) if _is_engine(args) else None)
    reason = None
    if args.openai and not streams:
        raise KvforgeError("--openai streams every answer from the engine: give --decoupled, or leave out --openai")
    if args.openai is None:
        reason = _nothing_to_serve(args, streams)
        args.openai = reason is None
    if not args.openai:
        _check_no_options(args, reason)
        return reason
    GatewayOptions(model_names=_names(args), **{name: getattr(args, name) for name in LIMITS})  # refuses what is wrong
    if args.api_key is not None:
        _take_key(args.api_key)
    return reason


def gateway_options(args: argparse.Namespace, doors: Doors, name: str | None) -> GatewayOptions:
    """Return what the gateway is started with; ``name`` is the model's where nobody gives one."""
    return GatewayOptions(
        address=doors.ip("openai"),
        port=args.openai_port,
        model_names=_names(args) or (() if name is None else (name,)),
        **{name: getattr(args, name) for name in (*LIMITS, *DEFAULT_FIELDS, *_SHARED)},
    )


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(dict.fromkeys(args.served_model_name or ()))


def _take_key(key: str) -> None:
    """Put a key of the command line into the environment, which the gateway's process reads; its own command line has
    none. Raises KvforgeError where there is one already, or it is empty."""
    if ENVIRONMENT in os.environ:
        raise KvforgeError(f"--api-key and ${ENVIRONMENT} are both given: leave out one of them")
    if not key.strip():
        raise KvforgeError("--api-key is empty: give it a key, or leave it out to serve without one")
    os.environ[ENVIRONMENT] = key


def is_decoupled(args: argparse.Namespace, manifest: Manifest | None) -> bool:
    """Whether requests may have several responses; ``manifest`` is the engine's, None before it is built."""
    if args.decoupled is not None:
        return bool(args.decoupled)
    return manifest is None or manifest.decoupled_mode is not False


def _is_engine(args: argparse.Namespace) -> bool:
    """Whether an engine is served, in place of a checkpoint, or of nothing, which is refused in due course."""
    return not names_checkpoint(args.engine, args.revision) and (args.engine / MANIFEST_FILE).is_file()


def _nothing_to_serve(args: argparse.Namespace, streams: bool) -> str | None:
    if not streams:
        return "its answers are streamed, and Triton has --no-decoupled"
    if _is_engine(args) and not (args.engine / TOKENIZER_DIR).is_dir():
        return "the engine has no tokenizer"
    return None


def _check_no_options(args: argparse.Namespace, reason: str | None) -> None:
    what = "leave out --no-openai" if reason is None else f"there is none, as {reason}"
    for option, default in OF_GATEWAY.items():
        value = getattr(args, option)
        if value is not None and value is not False and value != default:
            raise KvforgeError(f"{option_of(option)} is for the OpenAI gateway: {what}, or leave it out")
    if ENVIRONMENT in os.environ:
        raise KvforgeError(f"${ENVIRONMENT} is set, and only the OpenAI gateway has keys: {what}, or unset it")
