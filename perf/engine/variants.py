"""Build the 213M-parameter benchmark engines (no cut, cut 50%, cut 50% + 4-way AcrossKV) and measure them.

    python -m perf.engine.variants [--work DIR] [--num-runs 3] [--only prompt_heavy] [--output FILE]

The variants alternate within every run, so that their ratios come from one sitting. Writes JSON with the command,
the machine and, beside the time of each phase, its floor on this machine (see perf.engine.floors). perf.peers.compare
does the same with INT8 weights and beside other runtimes.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from kvforge.bench.workload import FIRST_TOKEN_ID, Workload, load_workloads, warm_up
from kvforge.compiler import BuildOptions, build_engine
from kvforge.engine import load_manifest
from kvforge.errors import EngineError
from kvforge.runtime import LLMEngine
from perf.engine.floors import best_rates, decode_work, measure_rates, prefill_work
from perf.engine.phases import run_phases
from perf.harness.random_checkpoint import LLAMA_213M, write_checkpoint
from perf.peers.phases import PhaseTimes

VARIANTS: dict[str, tuple[int | None, int]] = {"no cut": (None, 1), "cut 8": (8, 1), "cut 8, 4-way": (8, 4)}
"""Name to (cut, AcrossKV group size) of the 16-layer model."""


def prepare(work: Path, name: str, cut: int | None, group_size: int, max_seq_len: int) -> Path:
    """Return the engine of a variant under ``work``, built if it is not there yet."""
    slug = name.replace(" ", "-").replace(",", "")
    engine = work / f"engine-{slug}"
    if not is_loadable(engine):
        checkpoint = write_checkpoint(work / f"checkpoint-{slug}", LLAMA_213M, cut, group_size)
        build_engine(checkpoint, engine, BuildOptions(max_seq_len=max_seq_len), overwrite=True)
    return engine


def is_loadable(engine: Path) -> bool:
    """An engine is there, and this version reads it; one that an older version left is to be built again."""
    try:
        load_manifest(engine)
    except EngineError:
        return False
    return True


def run(work: Path, workloads: list[Workload], num_runs: int) -> dict[str, Any]:
    """Measure every variant on every workload, alternating; returns the report."""
    longest = max(workload.input_tokens + workload.output_tokens for workload in workloads)
    directories = {name: prepare(work, name, *spec, longest) for name, spec in VARIANTS.items()}
    engines = {name: LLMEngine(path, enable_prefix_cache=False, kv_cache_gib=1.0) for name, path in directories.items()}
    for engine in engines.values():
        warm_up(engine, workloads, seed=0)
    samples: dict[tuple[str, str], list[PhaseTimes]] = {}
    rng = np.random.default_rng(0)
    plan = [(w, name) for _ in range(num_runs) for w in workloads for name in engines]
    measured = [measure_rates()]
    for workload, name in tqdm(plan, unit="run"):
        shape = (workload.requests, workload.input_tokens)
        prompts = rng.integers(FIRST_TOKEN_ID, engines[name].config.vocab_size, shape)
        samples.setdefault((workload.name, name), []).append(
            run_phases(engines[name], prompts, workload.output_tokens)[0]
        )
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
    return {
        "command": "python -m perf.engine.variants " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "rates": asdict(rates),
        "rows": rows,
    }


def main() -> None:
    """Parse the command line, measure, print a table and write the report."""
    parser = argparse.ArgumentParser(description="Measure the benchmark engines against each other.")
    work = Path(tempfile.gettempdir()) / "kvforge-bench"
    parser.add_argument("--work", type=Path, default=work, help="engines, built once and kept (default: %(default)s)")
    workloads = Path(__file__).parents[1] / "workloads.json"
    parser.add_argument("--workloads", type=Path, default=workloads, help="JSON file (default: perf/workloads.json)")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this workload; may be given several times")
    parser.add_argument("--num-runs", type=int, default=3, help="runs, of which medians are reported (default 3)")
    parser.add_argument("--output", type=Path, help="write the report here as JSON")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch.export's own
    report = run(args.work, load_workloads(args.workloads, args.only), args.num_runs)
    print(f"{'workload':<14} {'variant':<14} {'TTFT s':>8} {'total s':>8} {'tok/s':>8}   prefill, decode s (floor)")
    for row in report["rows"]:
        phases = (f"{row[f'{phase}_s']:.2f} ({row[f'{phase}_floor_s']:.2f})" for phase in ("prefill", "decode"))
        print(
            f"{row['workload']:<14} {row['variant']:<14} {row['ttft_s']:>8.2f} {row['total_s']:>8.2f} "
            f"{row['combined_tok_s']:>8.0f}   {'  '.join(phases)}"
        )
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
