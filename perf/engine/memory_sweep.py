"""Throughput where memory for the K,V cache is short: the shape of Table 5 of SwiftKV (arXiv 2410.03960).

    python -m perf.engine.memory_sweep --output perf/results/memory-sweep-cpu

24 requests of 512 → 64 tokens on the 213M-parameter model, all there from the start, with pools of four sizes; no
prefix cache. Every engine should give the same tokens whatever its pool; where not, the table says of how many requests
and the command exits with 1. Each row becomes a line of OUTPUT.jsonl at once: with --append a call leaves out the rows
that are there, and ends after --minutes between two rows.

The bound "one cache for all layers" is the engine without a cut, given num_layers times the pages: as many tokens fit
as if all layers shared one cache, while nothing is skipped and each layer still makes and reads K,V of its own. It
shows what saving memory alone can gain.
"""

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvforge.manifest import load_manifest
from kvforge.runtime.engine import LLMEngine
from perf.engine.phases import run_phases
from perf.harness.command import begin_report
from perf.harness.experiment import BUILD_ONLY, RESUME, REUSE, Experiment, chosen, option, output, work
from perf.harness.files import append, read_lines, run_cells
from perf.harness.tables import markdown_table
from perf.peers.systems import CUT, CUT_4WAY, CUT_4WAY_INT4_KV, EVERY_VARIANT, NO_CUT, WORK, Variant, prepare_engine

REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 24, 512, 64
POOLS_MIB = (192, 48, 20, 10)
MERGED = "no cut, one cache for all layers (bound)"
ABOVE = "cut 8, 8-way"
ROWS = {
    NO_CUT: NO_CUT, MERGED: NO_CUT, CUT: CUT, CUT_4WAY: CUT_4WAY, f"{CUT_4WAY}, fp8 KV": f"{CUT_4WAY}, fp8 KV",
    CUT_4WAY_INT4_KV: CUT_4WAY_INT4_KV, ABOVE: ABOVE,
}  # fmt: skip
"""Row to the engine it runs on."""
ENGINES = EVERY_VARIANT | {ABOVE: Variant(8, 8)}


@dataclass(frozen=True)
class Load:
    """``requests`` prompts of ``input_tokens``, ``output_tokens`` generated for each."""

    requests: int = REQUESTS
    input_tokens: int = INPUT_TOKENS
    output_tokens: int = OUTPUT_TOKENS


def num_pages(engine_pages: int, pages_per_sequence: int, factor: int, load: Load) -> int:
    """Pages that a pool of ``engine_pages`` stands for, at most what all requests can use."""
    return min(engine_pages * factor, load.requests * pages_per_sequence)


def measure_row(path: Path, row: str, pool_mib: int, load: Load) -> dict[str, Any]:
    """Return one line: throughput, sequences that fit, preemptions, a digest of each request's tokens; no
    throughput where not even one sequence fits."""
    line: dict[str, Any] = {"row": row, "pool_mib": pool_mib}
    manifest = load_manifest(path)
    per_sequence = -(-(load.input_tokens + load.output_tokens - 1) // manifest.page_size)
    factor = manifest.model.num_layers if row == MERGED else 1
    pages = num_pages((pool_mib << 20) // manifest.page_bytes, per_sequence, factor, load)
    line["sequences_that_fit"] = pages // per_sequence
    if pages < per_sequence:
        return line | {"combined_tok_s": None}
    engine = LLMEngine(path, num_pages=pages, enable_prefix_cache=False)
    rng = np.random.default_rng(0)
    run_phases(engine, rng.integers(3, manifest.vocab_size, (1, load.input_tokens)), 2)
    prompts = rng.integers(3, manifest.vocab_size, (load.requests, load.input_tokens))
    before = engine.scheduler.num_preemptions
    times, outputs = run_phases(engine, prompts, load.output_tokens)
    tokens = load.requests * (load.input_tokens + load.output_tokens)
    return line | {
        "combined_tok_s": tokens / times.total_s,
        "total_s": times.total_s,
        "prefill_s": times.prefill_s,
        "decode_s": times.decode_s,
        "steps": times.prefill_steps + times.decode_steps,
        "preemptions": engine.scheduler.num_preemptions - before,
        "tokens_sha256": [hashlib.sha256(np.array(tokens, np.int32).tobytes()).hexdigest()[:16] for tokens in outputs],
    }


def changed_requests(lines: list[dict[str, Any]]) -> dict[str, int]:
    """Return, for every engine of which there are tokens, of how many requests they are not the same in all pools."""
    digests: dict[str, list[list[str]]] = {}
    for line in lines:
        if "tokens_sha256" in line:
            digests.setdefault(ROWS[line["row"]], []).append(line["tokens_sha256"])
    return {engine: sum(len(set(one)) > 1 for one in zip(*all_, strict=True)) for engine, all_ in digests.items()}


def markdown(lines: list[dict[str, Any]], told: dict[str, Any], load: Load) -> str:
    """Return the table: combined tok/s by row and pool, sequences that fit and preemptions in brackets."""
    pools = sorted({line["pool_mib"] for line in lines}, reverse=True)
    cells = {(line["row"], line["pool_mib"]): line for line in lines}
    rows = [row for row in ROWS if any(line["row"] == row for line in lines)]
    table = markdown_table(
        ["combined tok/s (sequences that fit; preemptions)", *(f"{pool} MiB" for pool in pools)],
        [[row, *(_cell(cells.get((row, pool))) for pool in pools)] for row in rows],
    )
    changed = {engine: count for engine, count in changed_requests(lines).items() if count}
    sameness = "Every engine gave the same tokens in all its columns."
    if changed:
        counts = ", ".join(f"{engine} {count} of {load.requests}" for engine, count in changed.items())
        sameness = f"Requests whose tokens are not the same in all columns: {counts}."
    parts = [
        "# Throughput with little memory for the cache",
        f"`{told['command']}`, {told['machine']}.",
        f"{load.requests} requests of {load.input_tokens} → {load.output_tokens} tokens, all there from the start; the "
        f"columns are sizes of the page pool. {sameness}",
        table,
        f'"{MERGED}" is the engine without a cut with as many pages as if all its layers shared one cache, while '
        "nothing is skipped and every layer still makes and reads K,V of its own: what saving memory alone can gain. "
        f'"{ABOVE}" has one cache for all layers above the cut.',
    ]
    return "\n\n".join(parts) + "\n"


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    if line["combined_tok_s"] is None:
        return "does not fit"
    return f"{line['combined_tok_s']:.0f} ({line['sequences_that_fit']}; {line['preemptions']})"


def engines_of(options: argparse.Namespace) -> dict[str, Path]:
    """Return the engine of each row that is asked for, built where it is not there yet."""
    names = dict.fromkeys(ROWS[row] for row in options.rows)
    return {
        name: prepare_engine(options.work, name, ENGINES[name], options.max_seq_len, options.reuse) for name in names
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what is missing; returns all lines there are, under the first command."""
    engines, load, file = engines_of(options), Load(options.requests), options.output.with_suffix(".jsonl")
    if not options.append:
        file.unlink(missing_ok=True)
    lines = read_lines(file)
    if not lines:
        append(file, begin_report("perf.engine.memory_sweep"))
    done = {(line["row"], line["pool_mib"]) for line in lines if "row" in line}
    plan = [(row, pool) for row in options.rows for pool in options.pools if (row, pool) not in done]
    run_cells(plan, lambda cell: [measure_row(engines[ROWS[cell[0]]], *cell, load)], file, options.minutes, "row")
    told, *lines = read_lines(file)
    return {**told, "rows": lines}


EXPERIMENT = Experiment(
    "perf.engine.memory_sweep", __doc__,
    options=(
        work(WORK),
        option("--max-seq-len", type=int, default=8224, help="of the engines (8224, as perf.peers.compare)"),
        chosen("--rows", list(ROWS), "default: all", "NAME"),
        option("--pools", nargs="+", type=int, default=list(POOLS_MIB), metavar="MIB", help="sizes of the pool"),
        option("--requests", type=int, default=REQUESTS), RESUME,
        output("OUTPUT.jsonl, .json and .md", "memory-sweep-cpu", as_json=False), REUSE, BUILD_ONLY,
    ),
    measure=measure, instead=lambda options: options.build_only and bool(engines_of(options)), settings=("requests",),
    shown=lambda report: markdown(report["rows"], report, Load(report["requests"])),
    failed=lambda report: any(changed_requests(report["rows"]).values()),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
