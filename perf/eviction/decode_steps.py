"""Decode steps over the context: the full cache beside policies that read less of it or keep less.

    python -m perf.eviction.decode_steps --output perf/results/decode-steps

A random model of four layers of 8 KV heads x 128, so that attention dominates, computes prompts of each length and then
--output-tokens more. Policies take turns. The floor of a step is the bytes that it reads, weights and what the policy
says of the cache, over the rate of a plain read measured before and after it, of which the better counts.
"""

import argparse
import statistics
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.manifest import Manifest
from kvforge.runtime.engine import LLMEngine
from perf.engine.floors import measure_rates
from perf.harness.batch import Batch
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Report, Row, number, numbers, output, ratio, work
from perf.harness.random_checkpoint import cached_checkpoint
from perf.harness.rounds import medians
from perf.shadowkv.speed import MODEL

CONTEXTS = (2048, 8192)
POLICIES = ("full", "quest:budget={}", "snapkv:budget={}", "adakv:budget={}")


def step_bytes(manifest: Manifest, context: int, num_generated: int) -> int:
    """Return the bytes that a sequence's decode step reads of the cache."""
    return manifest.model.num_owners * manifest.policy.device_bytes_read(manifest.owner_cache, context, num_generated)


def measure_cell(engine: LLMEngine, context: int, batch: int, num_tokens: int) -> dict[str, Any]:
    """Serve ``batch`` prompts; return seconds of their computation and of a decode step, in the middle of several."""
    prompts = np.random.default_rng(0).integers(3, MODEL["vocab_size"], (batch, context)).tolist()
    before, running = measure_rates(), Batch(engine, prompts, num_tokens)
    prefill_s, steps = running.start(), running.steps()  # those whose prompts came first end first
    running.finish()
    read = max(before.read, measure_rates().read)
    manifest = engine.manifest
    num_bytes = manifest.weight_bytes + batch * step_bytes(manifest, context, num_tokens // 2)
    step_s = statistics.median(steps[1:-1])
    return {"prefill_s": prefill_s, "step_s": step_s, "bytes": num_bytes, "floor_s": num_bytes / read}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Run every cell --turns times; rows have medians."""
    policies = [policy.format(args.budget) for policy in POLICIES]
    options = {"max_num_seqs": max(args.batch), "max_seq_len": max(args.context) + args.output_tokens}
    engines = {}
    for policy in policies:
        folder = args.work / f"{policy.replace(':', '-').replace('=', '')}-{options['max_seq_len']}-{max(args.batch)}"
        build = BuildOptions(dtype="bfloat16", kv_policy=policy, **options)
        engines[policy] = cached_engine(folder, lambda: cached_checkpoint(args.work / "checkpoint", MODEL), build)
    runs: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for cell in tqdm([*product(args.context, args.batch, policies)] * args.turns, unit="cell", disable=None):
        context, batch, policy = cell
        engine = LLMEngine(engines[policy], enable_prefix_cache=False)
        runs.setdefault(cell, []).append(measure_cell(engine, context, batch, args.output_tokens))
    for (context, batch, policy), found in runs.items():
        yield {"context": context, "batch": batch, "policy": policy, **medians(found)}


def columns(report: Report) -> list[tuple]:
    """Return the table's columns."""
    full = {(row["context"], row["batch"]): row["step_s"] for row in report["rows"] if row["policy"] == "full"}
    return [
        ("context", "context"), ("batch", "batch"), ("policy", "policy", "`{}`"), ("prompts s", "prefill_s", ".2f"),
        ("step ms", "step_s", ".2f", 1e3), ("floor ms", "floor_s", ".2f", 1e3), ("", ratio("floor_s", "step_s"), ".0%"),
        ("step, times as fast as full", lambda row: full[row["context"], row["batch"]] / row["step_s"], ".2f"),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    "perf.eviction.decode_steps", __doc__,
    options=(
        numbers("--context", CONTEXTS, metavar="N"), numbers("--batch", [1, 4], metavar="N"),
        number("--budget", 1024, "tokens of a KV head (default %(default)s)"), number("--output-tokens", 64),
        number("--turns", 3), work("runs/decode-steps", "checkpoint and engines"), output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=measure, settings=("turns",), title="Decode steps over the context", columns=columns,
    notes="Four layers, 16 heads and 8 KV heads of 128, bf16. Medians of {turns} turns. The floor is the bytes that a "
    "step reads over the rate of a plain read.",
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
