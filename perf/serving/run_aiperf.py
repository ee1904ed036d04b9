"""AIPerf over HTTP against `ensemble`'s generate_stream and the gateway's completions and chat endpoints.

    python -m perf.serving.run_aiperf [--engine DIR] [--concurrency 1 4 16] [--output FILE]

Without --engine the demo's tiny SwiftKV student is built and served. AIPerf is installed into the cache when needed.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.demo.run import STUDENT
from kvforge.manifest import TOKENIZER_DIR
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from perf.harness.experiment import STREAM_INTERVALS, Experiment, engine_place, lengths, levels, output, work
from perf.serving.load.aiperf import Target, find_aiperf, generate_stream, openai, run_aiperf
from perf.serving.load.engines import tiny_engine
from perf.serving.load.gateway import run_gateway
from perf.serving.load.level import label_interval


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every endpoint at every concurrency."""
    find_aiperf()
    engine = args.engine or tiny_engine(args.work, STUDENT)
    rows = []
    for interval in args.stream_interval:
        with TritonServer(engine, ServerOptions(kv_cache_gib=args.kv_cache_gib, stream_interval=interval)) as server:
            rows += _measure([generate_stream(server.http_url)], interval, engine, args)
            if interval == args.stream_interval[-1]:  # the gateway asks for its own
                with run_gateway(server) as gateway:
                    targets = [openai(gateway.url, gateway.model, endpoint) for endpoint in ("completions", "chat")]
                    rows += _measure(targets, 1, engine, args)
    return {"engine": engine.name, "rows": rows}


def _measure(targets: list[Target], interval: int, engine: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    plan = [(target, concurrency) for target in targets for concurrency in args.concurrency]
    for target, concurrency in tqdm(plan, desc="aiperf", unit="run", disable=None):
        num = max(args.min_requests, int(args.waves * concurrency))
        numbers = run_aiperf(
            target, engine / TOKENIZER_DIR, concurrency, num, args.input_tokens, args.output_tokens, args.timeout_s
        )
        rows.append({"endpoint": label_interval(target.name, interval), "concurrency": concurrency, **numbers})
    return rows


def _cell(kind: str, part: str | None = None) -> Callable[[dict[str, Any]], str]:
    """Return the value of a column, where AIPerf says it."""

    def shown(row: dict[str, Any]) -> str:
        found = row.get(kind, {}).get(part) if part else row.get(kind)
        return "-" if found is None else f"{found:.{1 if part else 2}f}"

    return shown


EXPERIMENT = Experiment(
    "perf.serving.run_aiperf", __doc__,
    options=(
        engine_place("--engine", "default: the demo's tiny SwiftKV student"), work(),
        levels([1, 4, 16], min_requests=32, kv_cache_gib=1.0), STREAM_INTERVALS, lengths(256, 32),
        output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=run, settings=("input_tokens", "output_tokens"),
    notes="AIPerf, {engine}, prompts of about {input_tokens} tokens, {output_tokens} tokens out. Times in ms.",
    columns=(
        ("endpoint", "endpoint"), ("concurrency", "concurrency"), ("TTFT p50", _cell("ttft_ms", "p50")),
        ("p99", _cell("ttft_ms", "p99")), ("inter-token p50", _cell("inter_token_ms", "p50")),
        ("p99", _cell("inter_token_ms", "p99")), ("end to end p50", _cell("end_to_end_ms", "p50")),
        ("p99", _cell("end_to_end_ms", "p99")), ("requests/s", _cell("requests_per_s")),
        ("output tok/s", _cell("output_tok_s")), ("failed", "num_failed"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
