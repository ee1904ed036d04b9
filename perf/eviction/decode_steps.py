"""Decode steps over the context: the full cache beside policies that read less of it or keep less.

    python -m perf.eviction.decode_steps --output perf/results/decode-steps

A random model of four layers of 8 KV heads x 128, so that attention dominates, computes prompts of each length and then
--output-tokens more. Policies take turns. The floor of a step is the bytes that it reads, weights and what the policy
says of the cache, over the rate of a plain read measured before and after it, of which the better counts.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.manifest import Manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from perf.engine.floors import measure_rates
from perf.harness.batch import Batch
from perf.harness.command import Report, add_report, add_work, begin_report, make_parser, positive, run_program
from perf.harness.engines import cached_engine
from perf.harness.random_checkpoint import cached_checkpoint
from perf.harness.tables import markdown_table
from perf.shadowkv.speed import MODEL

CONTEXTS = (2048, 8192)
POLICIES = ("full", "quest:budget={}", "snapkv:budget={}", "adakv:budget={}")


def step_bytes(manifest: Manifest, context: int, num_generated: int) -> int:
    """Return the bytes that a sequence's decode step reads of the cache."""
    return manifest.model.num_owners * manifest.policy.device_bytes_read(manifest.owner_cache, context, num_generated)


def measure_cell(engine: LLMEngine, context: int, batch: int, num_tokens: int) -> dict[str, Any]:
    """Serve ``batch`` prompts; return seconds of their computation and of a decode step, in the middle of several."""
    prompts = np.random.default_rng(0).integers(3, MODEL["vocab_size"], (batch, context)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    before, start = measure_rates(), time.perf_counter()
    running = Batch(engine, prompts, params)
    running.start()
    prefill_s, steps = time.perf_counter() - start, []
    while not running.num_finished:  # those whose prompts came first end first
        begin = time.perf_counter()
        running.step()
        steps.append(time.perf_counter() - begin)
    running.finish()
    read = max(before.read, measure_rates().read)
    manifest = engine.manifest
    num_bytes = manifest.weight_bytes + batch * step_bytes(manifest, context, num_tokens // 2)
    step_s = statistics.median(steps[1:-1])
    return {"prefill_s": prefill_s, "step_s": step_s, "bytes": num_bytes, "floor_s": num_bytes / read}


def measure(args: argparse.Namespace) -> Report:
    """Run every cell --turns times; rows have medians."""
    policies = [policy.format(args.budget) for policy in POLICIES]
    options = {"max_num_seqs": max(args.batch), "max_seq_len": max(args.context) + args.output_tokens}
    engines = {}
    for policy in policies:
        folder = args.work / f"{policy.replace(':', '-').replace('=', '')}-{options['max_seq_len']}-{max(args.batch)}"
        build = BuildOptions(dtype="bfloat16", kv_policy=policy, **options)
        engines[policy] = cached_engine(folder, lambda: cached_checkpoint(args.work / "checkpoint", MODEL), build)
    runs: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    cells = [(context, batch, policy) for context in args.context for batch in args.batch for policy in policies]
    for cell in tqdm(cells * args.turns, unit="cell", disable=None):
        context, batch, policy = cell
        engine = LLMEngine(engines[policy], enable_prefix_cache=False)
        runs.setdefault(cell, []).append(measure_cell(engine, context, batch, args.output_tokens))
    rows = [
        {"context": context, "batch": batch, "policy": policy}
        | {key: statistics.median(run[key] for run in found) for key in found[0]}
        for (context, batch, policy), found in runs.items()
    ]
    return begin_report("perf.eviction.decode_steps") | {"turns": args.turns, "rows": rows}


def table(report: Report) -> str:
    """Return the table with its explanation."""
    rows = report["rows"]
    full = {(row["context"], row["batch"]): row["step_s"] for row in rows if row["policy"] == "full"}
    head = ["context", "batch", "policy", "prompts s", "step ms", "floor ms", "", "step, times as fast as full"]
    lines = [
        [
            row["context"],
            row["batch"],
            f"`{row['policy']}`",
            f"{row['prefill_s']:.2f}",
            f"{1e3 * row['step_s']:.2f}",
            f"{1e3 * row['floor_s']:.2f}",
            f"{row['floor_s'] / row['step_s']:.0%}",
            f"{full[row['context'], row['batch']] / row['step_s']:.2f}",
        ]
        for row in rows
    ]
    parts = [
        "# Decode steps over the context",
        f"`{report['command']}`, {report['machine']}.",
        f"Four layers, 16 heads and 8 KV heads of 128, bf16. Medians of {report['turns']} turns. The floor is "
        "the bytes that a step reads over the rate of a plain read.",
        markdown_table(head, lines),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--context", type=positive, nargs="+", default=list(CONTEXTS), metavar="N")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 4], metavar="N")
    parser.add_argument("--budget", type=positive, default=1024, help="tokens of a KV head (default %(default)s)")
    parser.add_argument("--output-tokens", type=positive, default=64)
    parser.add_argument("--turns", type=positive, default=3)
    add_work(parser, "runs/decode-steps", "checkpoint and engines")
    add_report(parser, "OUTPUT.json and OUTPUT.md")
    args = parser.parse_args()
    return run_program(args, lambda: measure(args), table, markdown=True)


if __name__ == "__main__":
    sys.exit(main())
