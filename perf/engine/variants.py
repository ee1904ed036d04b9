"""Build the 213M-parameter benchmark engines (no cut, cut 50%, cut 50% + 4-way AcrossKV) and measure them.

    python -m perf.engine.variants [--work DIR] [--num-runs 3] [--only prompt_heavy] [--output OUTPUT]

The variants alternate within every run, so that their ratios come from one sitting. Writes JSON with the command,
the machine and, beside the time of each phase, its floor on this machine (see perf.engine.floors). perf.peers.compare
does the same with INT8 weights and beside other runtimes.
"""

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kvforge.bench.workload import FIRST_TOKEN_ID, load_workloads, warm_up
from kvforge.compiler import BuildOptions
from kvforge.runtime.engine import LLMEngine
from perf.engine.floors import best_rates, decode_work, measure_rates, prefill_work
from perf.engine.phases import run_phases
from perf.harness.command import add_report, add_work, begin_dated_report, make_parser, run_program
from perf.harness.engines import WORKLOADS, cached_engine
from perf.harness.random_checkpoint import LLAMA_213M, write_checkpoint
from perf.harness.tables import Column, Row, text_table
from perf.peers.phases import PhaseTimes

VARIANTS: dict[str, tuple[int | None, int]] = {"no cut": (None, 1), "cut 8": (8, 1), "cut 8, 4-way": (8, 4)}
"""Name to (cut, AcrossKV group size) of the 16-layer model."""


def prepare(work: Path, name: str, cut: int | None, group_size: int, max_seq_len: int) -> Path:
    """Return the engine of a variant under ``work``, built if it is not there yet."""
    slug = name.replace(" ", "-").replace(",", "")
    return cached_engine(
        work / f"engine-{slug}",
        lambda: write_checkpoint(work / f"checkpoint-{slug}", LLAMA_213M, cut, group_size),
        BuildOptions(max_seq_len=max_seq_len),
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every variant on every workload, alternating; returns the report."""
    workloads = load_workloads(args.workloads, args.only)
    longest = max(workload.input_tokens + workload.output_tokens for workload in workloads)
    directories = {name: prepare(args.work, name, *spec, longest) for name, spec in VARIANTS.items()}
    engines = {name: LLMEngine(path, enable_prefix_cache=False, kv_cache_gib=1.0) for name, path in directories.items()}
    for engine in engines.values():
        warm_up(engine, workloads, seed=0)
    samples: dict[tuple[str, str], list[PhaseTimes]] = {}
    rng = np.random.default_rng(0)
    plan = [(w, name) for _ in range(args.num_runs) for w in workloads for name in engines]
    measured = [measure_rates()]
    for workload, name in tqdm(plan, unit="run"):
        shape = (workload.requests, workload.input_tokens)
        prompts = rng.integers(FIRST_TOKEN_ID, engines[name].config.vocab_size, shape)
        times, _ = run_phases(engines[name], prompts, workload.output_tokens)
        samples.setdefault((workload.name, name), []).append(times)
        measured.append(measure_rates())
    rates, rows = best_rates(*measured), []
    for workload in workloads:
        tokens = workload.requests * (workload.input_tokens + workload.output_tokens)
        for name, engine in engines.items():
            runs = samples[workload.name, name]
            middle = {
                field: statistics.median(getattr(run, field) for run in runs)
                for field in ("ttft_s", "total_s", "prefill_s", "decode_s")
            }
            works = {
                "prefill": prefill_work(engine.manifest, workload.requests, workload.input_tokens, runs[0]),
                "decode": decode_work(engine.manifest, runs[0]),
            }
            floors = {f"{phase}_floor_s": work.floor_s(rates) for phase, work in works.items()}
            row = {"workload": workload.name, "variant": name, "combined_tok_s": tokens / middle["total_s"]}
            rows.append(row | middle | floors | {"runs_total_s": [run.total_s for run in runs]})
    return begin_dated_report("perf.engine.variants") | {"rates": asdict(rates), "rows": rows}


def _phases(row: Row) -> str:
    return "  ".join(f"{row[f'{phase}_s']:.2f} ({row[f'{phase}_floor_s']:.2f})" for phase in ("prefill", "decode"))


COLUMNS = (
    Column("workload", "workload", "<14"),
    Column("variant", "variant", "<14"),
    Column("TTFT s", "ttft_s", ">8.2f"),
    Column("total s", "total_s", ">8.2f"),
    Column("tok/s", "combined_tok_s", ">8.0f"),
    Column("  prefill, decode s (floor)", _phases, "<27"),
)


def main() -> int:
    """Measure and report."""
    parser = make_parser(__doc__)
    add_work(parser)
    parser.add_argument("--workloads", type=Path, default=WORKLOADS, help="JSON file (default: perf/workloads.json)")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this workload; may be given several times")
    parser.add_argument("--num-runs", type=int, default=3, help="runs, of which medians are reported (default 3)")
    add_report(parser, "OUTPUT.json", as_json=False)
    args = parser.parse_args()
    return run_program(args, lambda: run(args), lambda report: text_table(COLUMNS, report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
