"""Options of programs, each as what declares it in a parser: an ``Experiment`` lists them."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvforge.common.errors import EngineError
from kvforge.compiler.options import PACKED_DTYPES
from kvforge.manifest import target_of
from perf.harness.engines import WORK, WORKLOADS

Option = Callable[[argparse.ArgumentParser], Any]


def positive(text: str) -> int:
    """The type of a number that a program needs at least one of."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def positive_float(text: str) -> float:
    """As ``positive``, above zero."""
    if not (number := float(text)) > 0:  # NaN too
        raise argparse.ArgumentTypeError(f"{number:g} is not above 0")
    return number


def named(text: str) -> tuple[str, Path]:
    """The type of NAME=ENGINE."""
    name, mark, engine = text.partition("=")
    if not (name and mark and engine):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ENGINE")
    return name, Path(engine)


def engine_problem(folder: str | Path) -> str | None:
    """Return in a sentence why ``folder`` is no engine directory, of its manifest alone; None where it is one."""
    try:
        target_of(folder)
    except EngineError as error:
        return str(error)
    return None


def engine_folder(text: str) -> Path:
    """The type of an engine directory, which must be one."""
    if problem := engine_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return Path(text)


def option(*names: str, **details: Any) -> Option:
    """An option or argument as ``add_argument`` takes it."""
    return lambda parser: parser.add_argument(*names, **details)


def flag(name: str, told: str) -> Option:
    """An option without a value."""
    return option(name, action="store_true", help=told)


def place(name: str, told: str | None = None, **details: Any) -> Option:
    """A file or folder."""
    return option(name, type=Path, help=told, **details)


def engine_place(name: str = "engine", told: str | None = None, **details: Any) -> Option:
    """An engine directory."""
    return option(name, type=engine_folder, help=told, **details)


def number(name: str, default: int | None, told: str | None = None, **details: Any) -> Option:
    """A whole number of at least one."""
    return option(name, type=positive, default=default, help=told, **details)


def numbers(name: str, default: Sequence[int], told: str | None = None, metavar: str | None = None) -> Option:
    """As ``number``, several of them."""
    return option(name, type=positive, nargs="+", default=list(default), help=told, metavar=metavar)


def chosen(name: str, choices: Sequence[str], told: str | None = None, metavar: str | None = None) -> Option:
    """Some of ``choices``, all by default."""
    return option(name, nargs="+", choices=list(choices), default=list(choices), help=told, metavar=metavar)


def seed(default: int = 0, told: str | None = None) -> Option:
    """The seed of what is drawn."""
    return option("--seed", type=int, default=default, help=told)


def one_of(*options: Option) -> Option:
    """At most one of these."""

    def declare(parser: argparse.ArgumentParser) -> None:
        group: Any = parser.add_mutually_exclusive_group()
        for each in options:
            each(group)

    return declare


def several(*options: Option) -> Option:
    """All of these, one after the other."""
    return lambda parser: [declare(parser) for declare in options]


def lengths(input_tokens: int, output_tokens: int) -> Option:
    """The lengths of requests, with these defaults."""
    return several(number("--input-tokens", input_tokens), number("--output-tokens", output_tokens))


def levels(concurrency: list[int], min_requests: int, kv_cache_gib: float, waves: bool = True) -> Option:
    """The levels of load that a server gets one after the other, with these defaults."""
    wave = option("--waves", type=positive_float, default=3, help="requests per concurrency (default 3)")
    return several(
        option("--concurrency", type=positive, nargs="*", default=concurrency),
        number("--min-requests", min_requests, "of a level (default %(default)s)"),
        *([wave] if waves else []),
        option("--kv-cache-gib", type=positive_float, default=kv_cache_gib),
        option("--timeout-s", type=positive_float, default=300.0, help="per level (default 300)"),
    )


def output(files: str, default: str | Path | None = None, as_json: bool = True) -> Option:
    """Where a report goes, of which ``files`` says what is written, and with ``as_json`` how it is printed."""
    told = f"write {files}" + (" (default OUTPUT: %(default)s)" if default else "")
    kept = place("--output", told, default=None if default is None else Path(default))
    return several(kept, *([flag("--json", "print the report as JSON")] if as_json else []))


def work(default: str | Path = WORK, what: str = "engines, built once and kept") -> Option:
    """Where engines, and whatever else takes long to make, are kept."""
    return place("--work", f"{what} (default: %(default)s)", default=Path(default))


def decoding(input_tokens: int) -> Option:
    """Batches, dtypes, lengths, and where engines and results lie, of programs that measure decode steps."""
    return several(
        numbers("--batch", [1, 8]),
        option("--weight-dtype", nargs="+", default=["auto"], choices=["auto", *PACKED_DTYPES]),
        lengths(input_tokens, 33),
        work(),
        output("OUTPUT.json and OUTPUT.md"),
    )


BUILD_ONLY = flag("--build-only", "make the engines, run nothing")
REUSE = flag("--reuse", "take engines of older sources, too")
RESUME = several(
    flag("--append", "go on with OUTPUT.jsonl"),
    option("--minutes", type=float, default=float("inf"), help="start nothing after this time"),
)
"""How a run that was ended goes on, and when this one ends."""
STREAM_INTERVALS = option(
    "--stream-interval", type=int, nargs="+", default=[1], metavar="N",
    help="tokens in a response of a stream, 0 for all that wait (default 1)",
)  # fmt: skip
"""How many tokens a response of a stream has: a server for each number."""
CHOSEN_WORKLOADS = several(
    place("--workloads", "JSON file (default: perf/workloads.json)", default=WORKLOADS),
    option("--only", action="append", metavar="NAME", help="run this workload; may be given several times"),
)
