"""``kvforge bench URL``: a server under load, in the options of ``vllm bench serve``."""

import argparse
import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

from kvforge.commands.parsers import display_of
from kvforge.commands.remote_answers import model_of
from kvforge.commands.url_argument import add_url_options, check_for_url, server_of
from kvforge.common.errors import KvforgeError

OWN = ("num_prompts", "request_rate", "num_warmups", "goodput", "output")
_SHARED = ("input_len", "output_len", "concurrency", "seed", "json")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    group = add_url_options(parser)
    group.add_argument("--num-prompts", type=int, default=100, metavar="N", help="requests of each level")
    group.add_argument(
        "--request-rate", type=float, nargs="+", default=[float("inf")], metavar="R",
        help="requests that arrive in a second, by chance; several are measured one after the other (default: inf, "
        "all at once)",
    )  # fmt: skip
    group.add_argument("--num-warmups", type=int, default=1, metavar="N", help="requests before the first level")
    group.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS",
        help="count requests that keep these: ttft, tpot, e2el, as ttft:500 tpot:50",
    )  # fmt: skip
    group.add_argument(
        "--output", type=Path, metavar="FILE", help="write JSON here, and of several levels a figure beside it, .svg"
    )


def run_load(args: argparse.Namespace, sizes: dict[str, int]) -> int:
    """Measure, with prompts and answers of ``sizes``; raises KvforgeError, after the numbers where requests failed."""
    from kvforge.bench.load import Level, Load
    from kvforge.bench.load_report import plot, text_of
    from kvforge.common.figures import check_figure
    from kvforge.serving.processes.facts import raise_open_files_limit

    check_for_url(args, (*OWN, *_SHARED))
    for name in ("num_prompts", "num_warmups"):
        if getattr(args, name) < 1:
            raise KvforgeError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give at least 1.")
    if args.seed < 0:
        raise KvforgeError(f"--seed is {args.seed}; give 0 or more.")
    if not all(rate > 0 and math.isfinite(args.num_prompts / rate) for rate in args.request_rate):
        raise KvforgeError("--request-rate is of requests a second; give numbers above 0, or inf.")
    if len(args.request_rate) > 1 and len(args.concurrency or ()) > 1:
        raise KvforgeError("--request-rate and --concurrency have several levels; give one value to one of them.")
    goals = _goals(args.goodput)
    levels = [Level(rate, at_once) for rate in args.request_rate for at_once in args.concurrency or [None]]
    figure = None if args.output is None or len(levels) == 1 else args.output.with_suffix(".svg")
    if figure is not None:
        check_figure(figure)
    if args.output is not None:
        _check_output(args.output, figure)
    server, found = server_of(args), []
    raise_open_files_limit()

    async def measure() -> str:
        async with server:
            model = await model_of(args, server)
            load = Load(server, model, sizes["input_len"], sizes["output_len"], args.seed)
            for note in await load.prepare(args.num_warmups):
                display_of(args).note(note)
            for index, level in enumerate(levels):
                found.append(await load.run(level, index, args.num_prompts, goals))
                print(json.dumps(found[-1]) if args.json else text_of(found[-1]), flush=True)
            return model

    model = asyncio.run(measure())
    if args.output is not None:
        report = {"url": server.url, "model": model, **sizes, "seed": args.seed, "levels": found}
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if figure is not None:
        plot(found, figure)
    failed = sum(level["failed"] for level in found)
    if failed:
        first = next(level["errors"][0] for level in found if level["errors"])
        raise KvforgeError(f"{failed} of {len(levels) * args.num_prompts} requests failed, one of them so: {first}")
    return 0


def _check_output(path: Path, figure: Path | None) -> None:
    """Raise KvforgeError where the report could not be written after the measurement."""
    if not path.parent.is_dir():
        raise KvforgeError(f"there is no directory {path.parent} for --output; make it, or name another file.")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise KvforgeError(f"--output {path} cannot be written; name another file.")
    if path == figure:
        raise KvforgeError(f"--output {path} is the name of the figure; name the report otherwise, as NAME.json.")


def _goals(given: list[str] | None) -> Any:
    from kvforge.bench.traces import Goals

    if given is None:
        return None
    try:
        pairs = [(word.partition(":")[0], float(word.partition(":")[2]) / 1e3) for word in given]
        if len(dict(pairs)) == len(pairs) and all(goal > 0 for _, goal in pairs):
            return Goals(**dict(pairs))
    except (TypeError, ValueError):
        pass
    raise KvforgeError("--goodput is of ttft, tpot and e2el in milliseconds; give for example ttft:500 tpot:50.")
