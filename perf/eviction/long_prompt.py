"""First token of a prompt that is longer than its cache: the full cache beside rules that evict while it is computed.

    python -m perf.eviction.long_prompt --output perf/results/long-prompt

One prompt of --tokens on the 213M-parameter model, in a pool of just the pages that the policy needs. A rule evicts
`block` tokens at a time, and a step computes no more of the prompt than that: a small block keeps the cache fuller, a
large one multiplies more rows at once. Policies take turns.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvforge.manifest import load_manifest
from kvforge.runtime.config import resolve_config
from kvforge.runtime.engine import LLMEngine
from perf.eviction.batch_max import serve_group
from perf.eviction.engines import PolicyEngine, prepare
from perf.harness.experiment import Experiment, Row, number, numbers, option, output, work
from perf.harness.rounds import medians
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


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Run every policy --turns times; rows have medians."""
    policies = [FULL, *(f"{args.rule}:budget={args.budget},block={block}" for block in args.block)]
    runs: dict[str, list[dict[str, Any]]] = {}
    for policy in policies * args.turns:
        runs.setdefault(policy, []).append(measure_turn(args, policy))
    for policy, found in runs.items():
        yield {"policy": policy, **medians(found), "all_ttft_s": [run["ttft_s"] for run in found]}


EXPERIMENT = Experiment(
    "perf.eviction.long_prompt", __doc__,
    options=(
        number("--tokens", 16000), option("--rule", default="batchmax"),
        number("--budget", 1024, "tokens of a KV head (default %(default)s)"),
        numbers("--block", [64, 128, 256, 512], metavar="N"), number("--turns", 2), work(WORK),
        output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=measure, settings=("tokens", "turns"), title="First token of a prompt longer than its cache",
    notes="One prompt of {tokens} tokens, 213M parameters, bf16. Medians of {turns} turns.",
    columns=lambda report: (
        ("policy", "policy", "`{}`"), ("pool, tokens", "pool_tokens", ".0f"), ("first token s", "ttft_s", ".2f"),
        ("full's time over this", lambda row: report["rows"][0]["ttft_s"] / row["ttft_s"], ".2f"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
