"""Sweep served engines with Triton's perf_analyzer over gRPC streaming: latencies, throughput, goodput, a figure.

    python -m perf.serving.run_perf_analyzer [--engine NAME=DIR ...] [--concurrency 1 2 4 8 16] [--request-rate 2 4 8]

Without --engine the demo's tiny teacher and its SwiftKV student are built and served one after the other. Every
request forces --output-tokens tokens (end_id -1) on a prompt of its own of --input-tokens random words. How latencies
are computed is in perf/serving/load/profile_export.py. Writes OUTPUT.json, OUTPUT.md and OUTPUT.svg.
"""

import argparse
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.bench.traces import Goals
from kvforge.manifest import load_manifest
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from perf.harness.engines import tokenizer_of
from perf.harness.experiment import Experiment
from perf.harness.options import STREAM_INTERVALS, lengths, levels, option, output, place, positive_float, work
from perf.serving.load.client import FORCED, ask_text, ask_tokens
from perf.serving.load.engines import TINY, tiny_engine
from perf.serving.load.level import LevelMeter, label_interval
from perf.serving.load.prompts import make_prompts
from perf.serving.load.sweep import COLUMNS, plot

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
    if model == "tensorrt_llm":
        return [ask_tokens(tokenizer.encode(prompt), output_tokens, **FORCED) for prompt in prompts]
    return [ask_text(prompt, output_tokens, **FORCED) for prompt in prompts]


def sweep(name: str, engine: Path, interval: int, args: argparse.Namespace, goals: Goals) -> list[dict[str, Any]]:
    """Serve one engine with ``interval`` tokens in a response and run every level; one row each."""
    rows = []
    # A run that perf_analyzer broke off is repeated with the same prompts, which must not be found in the prefix cache.
    options = ServerOptions(kv_cache_gib=args.kv_cache_gib, stream_interval=interval, enable_prefix_cache=False)
    with TritonServer(engine, options) as server:
        levels = levels_of(args)

        def inputs(num: int, seed: int) -> list[dict[str, Any]]:
            return inputs_of(engine, args.model, num, args.input_tokens, args.output_tokens, seed)

        meter = LevelMeter(server, args.model, inputs, args, goals)
        for seed, (mode, value, options) in enumerate(tqdm(levels, desc=name, unit="level", disable=None)):
            # Enough for every level to be busy for a while: waves of the concurrency, or seconds of the rate.
            waves = int(args.waves * value) if mode == "concurrency" else 0
            numbers = meter.measure(options, max(args.min_requests, waves), seed)
            rows.append({"engine": name, "mode": mode, "level": value, **numbers})
    return rows


def engines_of(args: argparse.Namespace) -> dict[str, Path]:
    """Name to engine directory, in the order given."""
    if not args.engine:
        return {name: tiny_engine(args.work, model) for name, model in TINY.items()}
    pairs = [entry.partition("=") for entry in args.engine]
    return {name if directory else Path(name).name: Path(directory or name) for name, _, directory in pairs}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All engines, one after the other."""
    goals = {"ttft": args.goal_ttft_ms, "tpot": args.goal_tpot_ms}
    wanted = Goals(*(goal / 1e3 for goal in goals.values()))
    rows = [
        row
        for name, engine in engines_of(args).items()
        for interval in args.stream_interval
        for row in sweep(label_interval(name, interval), engine, interval, args, wanted)
    ]
    return {"goals_ms": goals, "rows": rows}


EXPERIMENT = Experiment(
    "perf.serving.run_perf_analyzer", __doc__,
    options=(
        option("--engine", action="append", metavar="[NAME=]DIR", help="default: the tiny pair of the demo"), work(),
        option("--model", choices=("ensemble", "tensorrt_llm"), default="ensemble"),
        levels([1, 2, 4, 8, 16, 32], min_requests=32, kv_cache_gib=1.0),
        option("--request-rate", type=positive_float, nargs="*", default=[], help="requests a second"),
        option("--request-distribution", choices=("constant", "poisson"), default="constant"),
        place("--request-intervals", "file of pauses between requests, in microseconds"), STREAM_INTERVALS,
        lengths(512, 32),
        option("--goal-ttft-ms", type=positive_float, default=500.0, help="for goodput (default 500)"),
        option("--goal-tpot-ms", type=positive_float, default=50.0, help="for goodput (default 50)"),
        output("OUTPUT.json, OUTPUT.md and OUTPUT.svg"),
    ),
    measure=run, settings=("model", "input_tokens", "output_tokens"),
    notes="perf_analyzer, gRPC streaming on `{model}`, prompts of {input_tokens} tokens, {output_tokens} tokens out. "
    "Times in ms; good: TTFT within {goals_ms[ttft]:g} ms and TPOT within {goals_ms[tpot]:g} ms.",
    columns=COLUMNS, plot=lambda report, path: plot(report["rows"], path),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
