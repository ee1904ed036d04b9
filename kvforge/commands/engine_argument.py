"""What runs an engine takes one, or a checkpoint that one is built of, once."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from kvforge.commands.build_options import add_build_options, flag_of, given_options
from kvforge.commands.parsers import add_revision, display_of
from kvforge.commands.url_argument import place
from kvforge.common.errors import KvforgeError
from kvforge.engine_cache.names import check_is_there, names_checkpoint
from kvforge.hub import find_checkpoint, parse_name

LIMITS = ("max_num_seqs", "max_num_tokens", "max_seq_len")
"""What an engine is both built and run with."""
_OF_BUILD_ALONE = ("decoupled_mode", "kv_prediction", "kv_scorer", "calibration", "draft_head")


def add_engine_argument(
    parser: argparse.ArgumentParser, limits: tuple[str, ...] = LIMITS, or_url: bool = False
) -> None:
    """Declare the positional argument ``engine`` and what it is built with, but for the ``limits``, which the command
    declares itself. ``or_url``: it may be the URL of a server."""
    server = "; or the URL of an OpenAI-compatible server" if or_url else ""
    parser.add_argument(
        "engine",
        type=place if or_url else Path,
        help="directory that kvforge build wrote; or a checkpoint, a directory, a GGUF file or OWNER/NAME[@REVISION] "
        f"on the Hub, of which an engine is built once and kept{server}",
    )
    flags = ", ".join(flag_of(name) for name in limits)
    building = parser.add_argument_group("building", f"for a checkpoint, besides {flags}, which are built for")
    add_revision(building)
    add_build_options(building, leave_out=(*LIMITS, *_OF_BUILD_ALONE))


def engine_of(args: argparse.Namespace, predicts: bool = False) -> tuple[Path, str | None]:
    """Return the engine directory, and what to call the model where that directory does not say it. ``predicts``: the
    options are for an engine with a predictor.

    Raises:
        CheckpointError, BuildError: a checkpoint that there is not or that cannot be built.
        KvforgeError: options of a build for an engine, of a predictor for a checkpoint, or nothing of this name.
    """
    given = given_options(args)
    if names_checkpoint(args.engine, args.revision):
        if predicts:
            raise KvforgeError(
                f"{args.engine} is a checkpoint, and --exact-first, --exact-last and --exact-share are for an engine "
                "with a predictor: build one with kvforge build --kv-prediction, or leave them out."
            )
        display, on_hub = display_of(args), parse_name(args.engine, args.revision)
        path = find_checkpoint(args.engine, args.revision, show_progress=display.bars)  # refused before torch is read
        from kvforge.compiler import BuildOptions
        from kvforge.engine_cache.build import cached_engine

        cached = cached_engine(path, BuildOptions(**given), on_hub=on_hub, display=display)
        return cached.path, cached.name
    check_is_there(args.engine)
    for name, value in given.items():
        if name not in LIMITS:
            _refuse_built(args.engine, name, value)
    return args.engine, None


def _refuse_built(engine: Path, name: str, value: Any) -> None:
    words = flag_of(name) if isinstance(value, bool) else f"{flag_of(name)} {shlex.quote(str(value))}"
    raise KvforgeError(
        f"{engine} is a built engine; {flag_of(name)} is fixed when building. Rebuild with kvforge build CHECKPOINT "
        f"-o ENGINE {words}."
    )
