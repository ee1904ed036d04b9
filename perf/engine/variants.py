"""Build the 213M-parameter benchmark engines (no cut, cut 50%, cut 50% + 4-way AcrossKV) and measure them.

    python -m perf.engine.variants [--work DIR] [--num-runs 3] [--only prompt_heavy] [--output OUTPUT]

The variants alternate within every run, so that their ratios come from one sitting. Writes JSON with the command,
the machine and, beside the time of each phase, its floor on this machine (see perf.engine.floors). perf.peers.compare
does the same with INT8 weights and beside other runtimes.
"""

import argparse
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
from perf.harness.engines import cached_engine
from perf.harness.experiment import CHOSEN_WORKLOADS, Experiment, Row, option, output, work
from perf.harness.random_checkpoint import LLAMA_213M, write_checkpoint
from perf.harness.rounds import medians
from perf.peers.phases import PhaseTimes

VARIANTS: dict[str, tuple[int | None, int]] = {"no cut": (None, 1), "cut 8": (8, 1), "cut 8, 4-way": (8, 4)}
"""Name to (cut, AcrossKV group size) of the 16-layer model."""
MEASURED = ("ttft_s", "total_s", "prefill_s", "decode_s")


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
            middle = medians([{name: getattr(run, name) for name in MEASURED} for run in runs])
            works = {
                "prefill": prefill_work(engine.manifest, workload.requests, workload.input_tokens, runs[0]),
                "decode": decode_work(engine.manifest, runs[0]),
            }
            floors = {f"{phase}_floor_s": work.floor_s(rates) for phase, work in works.items()}
            row = {"workload": workload.name, "variant": name, "combined_tok_s": tokens / middle["total_s"]}
            rows.append(row | middle | floors | {"runs_total_s": [run.total_s for run in runs]})
    return {"rates": asdict(rates), "rows": rows}


def _phases(row: Row) -> str:
    return "  ".join(f"{row[f'{phase}_s']:.2f} ({row[f'{phase}_floor_s']:.2f})" for phase in ("prefill", "decode"))


EXPERIMENT = Experiment(
    "perf.engine.variants", __doc__,
    options=(
        work(), CHOSEN_WORKLOADS,
        option("--num-runs", type=int, default=3, help="runs, of which medians are reported (default 3)"),
        output("OUTPUT.json", as_json=False),
    ),
    measure=run,
    columns=(
        ("workload", "workload", "<14"), ("variant", "variant", "<14"), ("TTFT s", "ttft_s", ">8.2f"),
        ("total s", "total_s", ">8.2f"), ("tok/s", "combined_tok_s", ">8.0f"),
        ("  prefill, decode s (floor)", _phases, "<27"),
    ),
    is_plain=True, is_dated=True,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
