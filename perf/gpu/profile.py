"""Where a step of Llama-3.1-8B's shape spends its time, by kernel: a prompt of 8192 tokens, and decode steps.

    PYTHONPATH=. python -m perf.gpu.profile --json perf/results/profile-h200.json

torch's profiler records one step of each kind after warm-up, with cut 16 and 4-way AcrossKV unless told otherwise; a
decode step is a replay of captured graphs. Weights and caches are random. `--device cpu --tiny` records a CPU's step.
"""

import argparse
import time
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kvforge.runtime.sessions.inputs import LowerStep, UpperStep
from kvforge.runtime.sessions.pools import Pools
from kvforge.runtime.sessions.session import Session
from perf.gpu import models
from perf.gpu.llama8b import limits_of, shape_of
from perf.gpu.machine import Kept, gpu_parser, parse_checked, synchronize
from perf.gpu.models import VARIANTS
from perf.harness.command import run_main
from perf.harness.options import option
from perf.harness.tables import text_table

PROMPT, CONTEXT, BATCH = 8192, 8192, 32
TINY_PROMPT, TINY_CONTEXT, TINY_BATCH = 48, 40, 3
WARM_UPS = 3


def run_step(session: Session, pools: Pools, queries: int, context: int, sequences: int) -> None:
    """Run one step: the last ``queries`` of ``context`` tokens of each sequence, one survivor each."""
    width = -(-context // session.manifest.page_size)
    table = torch.arange(sequences * width, dtype=torch.int32).view(sequences, width)
    positions = torch.arange(context - queries, context, dtype=torch.int32).repeat(sequences)
    pages = table.repeat_interleave(queries, 0).gather(1, (positions // session.manifest.page_size).long()[:, None])
    slots = (pages[:, 0] * session.manifest.page_size + positions % session.manifest.page_size).int()
    starts = torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32)
    lengths = torch.full((sequences,), context, dtype=torch.int32)
    tokens = torch.randint(3, session.manifest.vocab_size, (sequences * queries,), dtype=torch.int32)
    hidden = session.lower(LowerStep(tokens, positions, slots, starts, lengths, table, ()), pools)
    last = starts[1:] - 1
    ones = torch.arange(sequences + 1, dtype=torch.int32)
    session.upper(UpperStep(hidden, last, ones, positions, lengths, table, ()), pools)


def kernels_of(recorded: profile, device: str) -> list[dict[str, Any]]:
    """Return kernels (on a CPU: operators) with how often they ran and seconds in all, the longest first."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in recorded.key_averages():
        micros = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if micros > 0:
            found[event.key][0] += event.count
            found[event.key][1] += micros / 1e6
    rows = [{"kernel": name, "calls": int(calls), "seconds": seconds} for name, (calls, seconds) in found.items()]
    return sorted(rows, key=lambda row: -row["seconds"])


def record(session: Session, pools: Pools, device: str, *step: int) -> dict[str, Any]:
    """Return a step's seconds without the profiler, and its kernels."""
    for _ in range(WARM_UPS):
        run_step(session, pools, *step)
    synchronize(device)
    start = time.perf_counter()
    run_step(session, pools, *step)
    synchronize(device)
    seconds = time.perf_counter() - start
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        run_step(session, pools, *step)
        synchronize(device)
    rows = kernels_of(recorded, device)
    busy = sum(row["seconds"] for row in rows)
    return {"seconds": seconds, "busy_s": busy, "kernels": [{**row, "share": row["seconds"] / busy} for row in rows]}


COLUMNS = (
    ("ms", "seconds", ">9.3f", 1e3), ("share", "share", ">6.3f"), ("calls", "calls", ">6"),
    ("kernel", lambda row: row["kernel"][:100], "<"),
)  # fmt: skip


def told(name: str, step: dict[str, Any], most: int = 25) -> str:
    """Return a step as text."""
    title = f"{name}: {1e3 * step['seconds']:.2f} ms, kernels {1e3 * step['busy_s']:.2f} ms"
    return f"{title}\n{text_table(COLUMNS, step['kernels'][:most])}"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    variant = option("--variant", choices=VARIANTS, default="cut16-4way")
    return parse_checked(gpu_parser(__doc__, "llama8b", "steps", variant), arguments)


def main(arguments: list[str] | None = None) -> None:
    """Compile where that was not done, record both steps, print tables and write the report after each."""
    options = parse_arguments(arguments)
    device, variant = options.device, VARIANTS[options.variant]
    shape = shape_of(options.tiny)
    config = models.model_config(shape, variant)
    resolved = models.resolved_options(config, variant, limits_of(shape, device), device)
    folder = options.work / device / options.variant
    models.compile_graphs(config, resolved, folder)
    manifest = models.manifest_of(config, resolved)
    session = models.open_session(manifest, models.random_weights(config, resolved), folder)
    prompt, context, batch = (TINY_PROMPT, TINY_CONTEXT, TINY_BATCH) if options.tiny else (PROMPT, CONTEXT, BATCH)
    pools = session.allocate_pools(max(-(-prompt // manifest.page_size), batch * -(-context // manifest.page_size)))
    kept = Kept("perf.gpu.profile", arguments, options, variant=options.variant, steps={})
    steps = {f"prompt of {prompt}": (prompt, prompt, 1), f"decode, {batch} x {context}": (1, context, batch)}
    for name, step in steps.items():
        kept.report["steps"][name] = record(session, pools, device, *step)
        print(told(name, kept.report["steps"][name]), flush=True)
        kept.write()


if __name__ == "__main__":
    raise SystemExit(run_main(main))
