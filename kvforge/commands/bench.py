"""``kvforge bench``: time to first token and throughput of workloads, one JSON line each."""

import argparse
import json
from pathlib import Path

from kvforge.runtime.speculation.options import add_speculation_options, speculation_options


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("bench", help="measure an engine on workloads of random tokens")
    parser.add_argument("engine", type=Path, help="engine directory")
    parser.add_argument(
        "--workloads",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSON: {"name": {"requests": 8, "input_tokens": 512, "output_tokens": 64}, …}',
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="run only this workload")
    parser.add_argument(
        "--num-runs",
        type=int,
        default=1,
        metavar="N",
        help="runs of each workload; the one of median total time is reported (1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random prompts (0)")
    parser.add_argument(
        "--max-num-tokens",
        type=int,
        default=None,
        metavar="N",
        help="tokens a step at most (default: the engine's limit)",
    )
    parser.add_argument("--kv-cache-gib", type=float, metavar="GIB", help="memory of the KV cache")
    parser.add_argument(
        "--max-seq-len", type=int, metavar="N", help="tokens of a sequence at most (default: the engine's limit)"
    )
    add_speculation_options(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON line for each workload")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; raises EngineError, or KvforgeError for a workload that cannot be read or does not fit."""
    from kvforge.bench.table import BenchTable
    from kvforge.bench.workload import check_fits, load_workloads, measure, warm_up
    from kvforge.common.errors import KvforgeError
    from kvforge.runtime import LLMEngine

    if args.num_runs < 1:
        raise KvforgeError(f"--num-runs is {args.num_runs}; give at least 1.")
    workloads = load_workloads(args.workloads, args.only)
    options = speculation_options(args)
    engine = LLMEngine(
        args.engine,
        enable_prefix_cache=False,
        max_num_tokens=args.max_num_tokens,
        kv_cache_gib=args.kv_cache_gib,
        max_seq_len=args.max_seq_len,
        **options,
    )
    for workload in workloads:
        check_fits(workload, engine)
    table = BenchTable(
        drafts=options["speculative"] is not None,
        early_exits=options["early_exit_threshold"] is not None,
        policy=engine.config.kv_policy.report_columns,
    )
    if not args.json:
        print(table.head())
    warm_up(engine, workloads, args.seed)
    for workload in workloads:
        result = measure(workload, engine, args.seed, args.num_runs)
        print(json.dumps(result) if args.json else table.row(workload, result), flush=True)
    return 0
