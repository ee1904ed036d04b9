"""``kvforge bench``: time to first token and throughput of workloads, of an engine or of a server."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvforge.commands.bench_url import OWN, add_load_options, run_load
from kvforge.commands.engine_argument import add_engine_argument, engine_of
from kvforge.commands.parsers import add_command, add_kv_cache, add_threads
from kvforge.commands.url_argument import check_for_engine, is_url
from kvforge.common.errors import KvforgeError
from kvforge.runtime.async_scheduling import add_async_scheduling
from kvforge.runtime.speculation.options import add_speculation_options, speculation_options

if TYPE_CHECKING:
    from kvforge.bench.workload import Workload

_SIZES = {"input_len": 512, "output_len": 64}
"""The lengths of prompts and answers that nobody gives."""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "bench",
        help="measure an engine, a checkpoint or a server on random tokens",
        example="kvforge bench ENGINE --input-len 1024 --output-len 128 --concurrency 8",
    )
    add_engine_argument(parser, ("max_num_tokens", "max_seq_len"), or_url=True)
    add_load_options(parser)
    parser.add_argument(
        "--workloads",
        type=Path,
        metavar="FILE",
        help='JSON: {"name": {"requests": 8, "input_tokens": 512, "output_tokens": 64}, …} (default: one workload of '
        "the next three options)",
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="run only this workload of the file")
    parser.add_argument("--input-len", type=int, metavar="N", help="tokens of a prompt (default: 512)")
    parser.add_argument("--output-len", type=int, metavar="N", help="tokens generated for a prompt (default: 64)")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", metavar="N",
        help="prompts that start at once, of a server requests that are open at a time; several are measured one "
        "after the other (default: 1, of a server all)",
    )  # fmt: skip
    parser.add_argument(
        "--num-runs",
        type=int,
        default=1,
        metavar="N",
        help="runs of each workload; the one of median total time is reported",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random prompts (default: 0)")
    parser.add_argument(
        "--max-num-tokens",
        type=int,
        default=None,
        metavar="N",
        help="tokens a step at most (default: the engine's limit)",
    )
    add_kv_cache(parser)
    parser.add_argument(
        "--max-seq-len", type=int, metavar="N", help="tokens of a sequence at most (default: the engine's limit)"
    )
    add_threads(parser)
    add_speculation_options(parser)
    add_async_scheduling(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON line for each workload")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; raises EngineError, or KvforgeError for a workload that cannot be read or does not fit."""
    if is_url(args.engine):
        return run_load(args, _SIZES | _given_sizes(args))
    check_for_engine(args, OWN)
    from kvforge.bench.table import BenchTable
    from kvforge.bench.workload import check_fits, measure, warm_up
    from kvforge.runtime.loading import load_engine

    if args.num_runs < 1:
        raise KvforgeError(f"--num-runs is {args.num_runs}; give at least 1.")
    workloads = _workloads(args)
    options = speculation_options(args) | ({"async_scheduling": True} if args.async_scheduling else {})
    directory, _ = engine_of(args, predicts="exact_tokens" in options)
    engine = load_engine(
        directory,
        enable_prefix_cache=False,
        max_num_tokens=args.max_num_tokens,
        kv_cache_gib=args.kv_cache_gib,
        max_seq_len=args.max_seq_len,
        **options,
    )
    for workload in workloads:
        check_fits(workload, engine)
    drafts = options["speculative"] is not None
    table = BenchTable(
        drafts=drafts,
        early_exits=options["early_exit_threshold"] is not None,
        prompt_exits="early_exit_prompts" in options,
        policy=engine.config.kv_policy.keeping.report_columns,
    )
    if not args.json:
        print(table.head())
    warm_up(engine, workloads, args.seed)
    for workload in workloads:
        result = measure(workload, engine, args.seed, args.num_runs, drafts)
        print(json.dumps(result) if args.json else table.row(workload, result), flush=True)
    return 0


def _workloads(args: argparse.Namespace) -> "list[Workload]":
    """Return those of the file, or the one that the options describe.

    Raises:
        KvforgeError: a file is given beside them or cannot be read, or one of them is below 1.
    """
    from kvforge.bench.workload import Workload, load_workloads

    given = _given_sizes(args)
    if args.workloads is not None:
        for name in (*_SIZES, "concurrency"):
            if getattr(args, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise KvforgeError(f"{flag} describes a workload, and --workloads has its own; give one of them.")
        return load_workloads(args.workloads, args.only)
    if args.only:
        raise KvforgeError("--only chooses from a file; add --workloads FILE, or leave it out.")
    num_input, num_output = (_SIZES | given).values()
    return [Workload(f"{num}x{num_input}+{num_output}", num, num_input, num_output) for num in args.concurrency or [1]]


def _given_sizes(args: argparse.Namespace) -> dict[str, int]:
    """The lengths that are given. Raises KvforgeError where one of them, or a concurrency, is below 1."""
    for name in (*_SIZES, "concurrency"):
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [] if value is None else [value]:
            if number < 1:
                raise KvforgeError(f"--{name.replace('_', '-')} is {number}; give at least 1.")
    return {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
