"""Sweep served engines with Triton's perf_analyzer over gRPC streaming: latencies, throughput, goodput, a figure.

    python -m perf.run_perf_analyzer [--engine NAME=DIR ...] [--concurrency 1 2 4 8 16] [--request-rate 2 4 8]

Without --engine the demo's tiny teacher and its SwiftKV student are built and served one after the other. Every
request forces --output-tokens tokens (end_id -1) on a prompt of its own of --input-tokens random words. How latencies
are computed is in perf/load/profile_export.py. Writes OUTPUT.json, OUTPUT.md and OUTPUT.svg.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.engine import load_manifest
from kvforge.errors import KvforgeError
from kvforge.figures import check_figure
from kvforge.serving.launcher import ServerOptions, TritonServer
from perf.load.client import ask_text, ask_tokens
from perf.load.engines import TINY, WORK, tiny_engine, tokenizer_of
from perf.load.files import write_report
from perf.load.machine import describe_machine
from perf.load.perf_analyzer import run_perf_analyzer
from perf.load.profile_export import Goals, read_traces, summarise
from perf.load.prompts import make_prompts
from perf.load.sweep import markdown, plot

Level = tuple[str, float, list[str]]


def levels_of(args: argparse.Namespace) -> list[Level]:
    """(mode, value, perf_analyzer's options) of every load level asked for."""
    levels: list[Level] = [("concurrency", n, ["--concurrency-range", str(n)]) for n in args.concurrency]
    distribution = ["--request-distribution", args.request_distribution]
    levels += [("request rate", r, ["--request-rate-range", f"{r:g}", *distribution]) for r in args.request_rate]
    if args.request_intervals:
        intervals = [int(line) for line in args.request_intervals.read_text().split()]
        mean_rate = 1e6 * len(intervals) / sum(intervals)
        levels.append(("request intervals", mean_rate, ["--request-intervals", str(args.request_intervals)]))
    return levels


def inputs_of(engine: Path, model: str, num: int, input_tokens: int, output_tokens: int, seed: int) -> list[dict]:
    """The inputs of ``num`` requests; no prompt comes twice, so that no prefix is found in the cache."""
    tokenizer = tokenizer_of(engine)
    prompts = make_prompts(tokenizer, load_manifest(engine).vocab_size, num, input_tokens, seed)
    more = {"end_id": -1, "return_num_output_tokens": True}
    if model == "tensorrt_llm":
        return [ask_tokens(tokenizer.encode(prompt), output_tokens, **more) for prompt in prompts]
    return [ask_text(prompt, output_tokens, **more) for prompt in prompts]


def num_requests_of(mode: str, value: float, args: argparse.Namespace) -> int:
    """Enough for every level to be busy for a while: waves of the concurrency, or seconds of the rate."""
    return max(args.min_requests, int(args.waves * value)) if mode == "concurrency" else args.min_requests


def sweep(name: str, engine: Path, args: argparse.Namespace, goals: Goals) -> list[dict[str, Any]]:
    """Serve one engine and run every level; one row each."""
    rows = []
    with TritonServer(engine, ServerOptions(kv_cache_gib=args.kv_cache_gib)) as server:
        levels = levels_of(args)
        warm = inputs_of(engine, args.model, 2, args.input_tokens, args.output_tokens, seed=10**6)
        run_perf_analyzer(server.grpc_url, args.model, warm, ["--concurrency-range", "1"], 2, args.timeout_s)
        for seed, (mode, value, options) in enumerate(tqdm(levels, desc=name, unit="level", disable=None)):
            num = num_requests_of(mode, value, args)
            data = inputs_of(engine, args.model, num, args.input_tokens, args.output_tokens, seed)
            experiment = run_perf_analyzer(server.grpc_url, args.model, data, options, num, args.timeout_s)
            sent = len(experiment["requests"])
            numbers = summarise(read_traces(experiment), sent, args.input_tokens, args.output_tokens, goals)
            rows.append({"engine": name, "mode": mode, "level": value, **numbers})
    return rows


def engines_of(args: argparse.Namespace) -> dict[str, Path]:
    """Name to engine directory, in the order given."""
    if not args.engine:
        return {name: tiny_engine(args.work, model) for name, model in TINY.items()}
    pairs = [entry.partition("=") for entry in args.engine]
    return {name if directory else Path(name).name: Path(directory or name) for name, _, directory in pairs}


def run(argv: list[str]) -> dict[str, Any]:
    """All engines, one after the other, as the command line ``argv`` says; returns the report."""
    args = make_parser().parse_args(argv)
    goals = Goals(args.goal_ttft_ms / 1e3, args.goal_tpot_ms / 1e3)
    rows = [row for name, engine in engines_of(args).items() for row in sweep(name, engine, args, goals)]
    return {
        "command": " ".join(["python -m perf.run_perf_analyzer", *argv]),
        "machine": describe_machine(),
        "model": args.model,
        "input_tokens": args.input_tokens,
        "output_tokens": args.output_tokens,
        "goals_ms": {"ttft": args.goal_ttft_ms, "tpot": args.goal_tpot_ms},
        "rows": rows,
    }


def report_markdown(report: dict[str, Any]) -> str:
    """The table under what it was measured with."""
    goals = report["goals_ms"]
    return (
        f"`{report['command']}`\n\n{report['machine']}. perf_analyzer, gRPC streaming on `{report['model']}`, "
        f"prompts of {report['input_tokens']} tokens, {report['output_tokens']} tokens out. Times in ms; good: TTFT "
        f"within {goals['ttft']:g} ms and TPOT within {goals['tpot']:g} ms.\n\n{markdown(report['rows'])}\n"
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Sweep served engines with perf_analyzer.")
    parser.add_argument("--engine", action="append", metavar="[NAME=]DIR", help="default: the tiny pair of the demo")
    parser.add_argument("--work", type=Path, default=WORK, help="where the tiny pair is kept (default: %(default)s)")
    parser.add_argument("--model", choices=("ensemble", "tensorrt_llm"), default="ensemble")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--request-rate", type=float, nargs="*", default=[], help="requests a second")
    parser.add_argument("--request-distribution", choices=("constant", "poisson"), default="constant")
    parser.add_argument("--request-intervals", type=Path, help="file of pauses between requests, in microseconds")
    parser.add_argument("--min-requests", type=int, default=32, help="requests per level at least (default 32)")
    parser.add_argument("--waves", type=float, default=3, help="requests per level and concurrency (default 3)")
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--goal-ttft-ms", type=float, default=500.0, help="for goodput (default 500)")
    parser.add_argument("--goal-tpot-ms", type=float, default=50.0, help="for goodput (default 50)")
    parser.add_argument("--kv-cache-gib", type=float, default=1.0)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="per level (default 300)")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json, OUTPUT.md and OUTPUT.svg")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    try:
        if args.output:
            check_figure(args.output.with_suffix(".svg"))
        report = run(sys.argv[1:])
        print(json.dumps(report, indent=1) if args.json else report_markdown(report))
        if args.output:
            write_report(args.output, report, report_markdown(report))
            plot(report["rows"], args.output.with_suffix(".svg"))
    except KvforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
