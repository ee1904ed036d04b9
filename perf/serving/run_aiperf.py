"""AIPerf over HTTP against `ensemble`'s generate_stream and the gateway's completions and chat endpoints.

    python -m perf.serving.run_aiperf [--engine DIR] [--concurrency 1 4 16] [--output FILE]

Without --engine the demo's tiny SwiftKV student is built and served. AIPerf is installed into the cache when needed.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.demo.run import STUDENT
from kvforge.manifest import TOKENIZER_DIR
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from perf.harness.command import (
    add_lengths,
    add_levels,
    add_report,
    add_stream_intervals,
    add_work,
    begin_report,
    label_interval,
    make_parser,
    run_program,
)
from perf.harness.tables import markdown_table
from perf.serving.load.aiperf import Target, find_aiperf, generate_stream, openai, run_aiperf
from perf.serving.load.engines import tiny_engine
from perf.serving.load.gateway import run_gateway


def run(args: argparse.Namespace, arguments: list[str] | None = None) -> dict[str, Any]:
    """Every endpoint at every concurrency; returns the report, which says ``arguments`` were given (default: the
    command line's)."""
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
    return {
        **begin_report("perf.serving.run_aiperf", arguments),
        "engine": engine.name,
        "input_tokens": args.input_tokens,
        "output_tokens": args.output_tokens,
        "rows": rows,
    }


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


def markdown(report: dict[str, Any]) -> str:
    """One line per endpoint and concurrency; times in ms."""
    head = ("endpoint", "concurrency", "TTFT p50", "p99", "inter-token p50", "p99", "end to end p50", "p99")
    lines = []
    for row in report["rows"]:
        times = [row.get(kind, {}).get(q) for kind in ("ttft_ms", "inter_token_ms", "end_to_end_ms")
                 for q in ("p50", "p99")]  # fmt: skip
        cells = ["-" if value is None else f"{value:.1f}" for value in times]
        cells += [f"{row[name]:.2f}" if name in row else "-" for name in ("requests_per_s", "output_tok_s")]
        lines.append([row["endpoint"], row["concurrency"], *cells, row["num_failed"]])
    return (
        f"`{report['command']}`\n\n{report['machine']}. AIPerf, {report['engine']}, prompts of about "
        f"{report['input_tokens']} tokens, {report['output_tokens']} tokens out. Times in ms.\n\n"
        f"{markdown_table([*head, 'requests/s', 'output tok/s', 'failed'], lines)}\n"
    )


def parser() -> argparse.ArgumentParser:
    made = make_parser(__doc__)
    made.add_argument("--engine", type=Path, help="default: the demo's tiny SwiftKV student")
    add_work(made)
    add_levels(made, [1, 4, 16], min_requests=32, kv_cache_gib=1.0)
    add_stream_intervals(made)
    add_lengths(made, 256, 32)
    add_report(made, "OUTPUT.json and OUTPUT.md")
    return made


def main() -> int:
    return run_program(args := parser().parse_args(), lambda: run(args), markdown, markdown=True)


if __name__ == "__main__":
    sys.exit(main())
