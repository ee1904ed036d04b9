"""First token of a prompt that is longer than its cache: the full cache beside rules that evict while it is computed.

    python -m perf.eviction.long_prompt --output perf/results/long-prompt

One prompt of --tokens on the 213M-parameter model, in a pool of just the pages that the policy needs. A rule evicts
`block` tokens at a time, and a step computes no more of the prompt than that: a small block keeps the cache fuller, a
large one multiplies more rows at once. Policies take turns.
"""

import argparse
import statistics
import sys
from typing import Any

import numpy as np

from kvforge.manifest import load_manifest
from kvforge.runtime.config import resolve_config
from kvforge.runtime.engine import LLMEngine
from perf.eviction.batch_max import serve_group
from perf.eviction.engines import PolicyEngine, prepare
from perf.harness.command import Report, add_report, add_work, begin_report, make_parser, positive, run_program
from perf.harness.tables import markdown_table
from perf.peers.systems import WORK

FULL = "full"


def measure_turn(args: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Compute the prompt once; returns the seconds to the first token and the tokens that the pool holds."""
    path = prepare(args.work, PolicyEngine(policy), args.tokens + 1, max_num_seqs=1)
    manifest = load_manifest(path)
    config = resolve_config(manifest, 0, max_num_seqs=1, num_pages=1 << 16)
    pages, _ = config.pages_needed(args.tokens, args.tokens)
    engine = LLMEngine(path, num_pages=pages, enable_prefix_cache=False, max_num_seqs=1)
    prompts = np.random.default_rng(1).integers(3, manifest.vocab_size, (1, args.tokens))
    serve_group(engine, prompts[:, :64], 2)
    times, _ = serve_group(engine, prompts, 1)
    return {"ttft_s": times.ttft_s, "pool_tokens": pages * manifest.page_size}


def measure(args: argparse.Namespace) -> Report:
    """Run every policy --turns times; rows have medians."""
    policies = [FULL, *(f"{args.rule}:budget={args.budget},block={block}" for block in args.block)]
    runs: dict[str, list[dict[str, Any]]] = {}
    for policy in policies * args.turns:
        runs.setdefault(policy, []).append(measure_turn(args, policy))
    rows = [
        {"policy": policy}
        | {name: statistics.median(run[name] for run in found) for name in found[0]}
        | {"all_ttft_s": [run["ttft_s"] for run in found]}
        for policy, found in runs.items()
    ]
    return begin_report("perf.eviction.long_prompt") | {"tokens": args.tokens, "turns": args.turns, "rows": rows}


def table(report: Report) -> str:
    """Return the table with its explanation."""
    rows = report["rows"]
    head = ["policy", "pool, tokens", "first token s", "full's time over this"]
    lines = [
        [
            f"`{row['policy']}`",
            f"{row['pool_tokens']:.0f}",
            f"{row['ttft_s']:.2f}",
            f"{rows[0]['ttft_s'] / row['ttft_s']:.2f}",
        ]
        for row in rows
    ]
    parts = [
        "# First token of a prompt longer than its cache",
        f"`{report['command']}`, {report['machine']}.",
        f"One prompt of {report['tokens']} tokens, 213M parameters, bf16. Medians of {report['turns']} turns.",
        markdown_table(head, lines),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=positive, default=16000)
    parser.add_argument("--rule", default="batchmax")
    parser.add_argument("--budget", type=positive, default=1024, help="tokens of a KV head (default %(default)s)")
    parser.add_argument("--block", type=positive, nargs="+", default=[64, 128, 256, 512], metavar="N")
    parser.add_argument("--turns", type=positive, default=2)
    add_work(parser, WORK)
    add_report(parser, "OUTPUT.json and OUTPUT.md")
    args = parser.parse_args()
    return run_program(args, lambda: measure(args), table, markdown=True)


if __name__ == "__main__":
    sys.exit(main())
