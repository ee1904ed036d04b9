"""vLLM with a SwiftKV cut, by kvforge's plugin, beside vLLM without one: seconds until the first token, by turns.

    python -m perf.peers.vllm_cut --vllm-python VENV/bin/python --output perf/results/vllm-cut

The 213M shape with random weights: without a cut as vLLM runs it (compiled) and as it is written (eager, which models
with a cut are too), and with a cut at half and 4-way AcrossKV above it. All stay loaded, each in a process of its own;
in a round each has the same prompt, and who goes first changes with the round. The ratio is that of a round.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from kvforge.bench.workload import Workload
from kvforge.vllm_engine.environment import in_interpreter, probe
from kvforge.vllm_engine.vllm_core import UNCOMPILED
from model_defs import families
from perf.harness.command import add_report, add_work, begin_report, make_parser, positive, run_program
from perf.harness.random_checkpoint import LLAMA_213M
from perf.harness.tables import markdown_table
from perf.peers.client import Worker
from perf.peers.systems import CUT_4WAY, NO_CUT, VARIANTS, WORK, checkpoint_of

EAGER = f"{NO_CUT}, eager"
SYSTEMS = {NO_CUT: NO_CUT, EAGER: NO_CUT, CUT_4WAY: CUT_4WAY}
"""What is measured, and the checkpoint that it runs."""


def worker_command(work: Path, python: str, name: str, dtype: str) -> list[str]:
    """Return the command of a system's worker, whose checkpoint is written where it is not there yet."""
    variant = VARIANTS[SYSTEMS[name]]
    family = families()[LLAMA_213M["model_type"]]
    architecture = family.architecture if variant.cut is None else family.swiftkv_architecture
    arguments = {
        "dtype": dtype,
        "enforce_eager": name == EAGER,
        "kv_sharing_fast_prefill": variant.cut is not None,
        "hf_overrides": {"architectures": [architecture]},
        "skip_tokenizer_init": True,
    }
    checkpoint = checkpoint_of(work, variant)
    if variant.cut is not None:
        arguments["compilation_config"] = UNCOMPILED
    return in_interpreter(python, ["-m", "perf.peers.vllm_worker", str(checkpoint), json.dumps(arguments)])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds; returns the report."""
    found = probe(args.vllm_python)
    workloads = [Workload(str(length), 1, length, 1) for length in args.input_tokens]
    runs: dict[int, dict[str, list[float]]] = {n: {name: [] for name in args.systems} for n in args.input_tokens}
    workers: dict[str, Worker] = {}
    try:
        for name in args.systems:
            workers[name] = Worker(name, worker_command(args.work, found.python, name, args.dtype))
        for turn in range(args.rounds):
            first = turn % len(args.systems)
            for workload in workloads:
                for name in [*args.systems[first:], *args.systems[:first]]:
                    times = workers[name].run(workload, turn)
                    runs[workload.input_tokens][name].append(times["ttft_s"])
    finally:
        for worker in workers.values():
            worker.close()
    rows = [row_of(length, name, by_name) for length, by_name in runs.items() for name in by_name]
    return {**begin_report("perf.peers.vllm_cut"), "vllm": found.vllm, "dtype": args.dtype, "rows": rows}


def row_of(length: int, name: str, by_name: dict[str, list[float]]) -> dict[str, Any]:
    """Return a system's seconds at one length, and by round its share of those of vLLM without a cut."""
    ratios = {
        of: [mine / other for mine, other in zip(by_name[name], by_name[of], strict=True)]
        for of in (NO_CUT, EAGER)
        if of in by_name and of != name
    }
    medians = {of: statistics.median(values) for of, values in ratios.items()}
    return {
        "input_tokens": length,
        "system": name,
        "seconds": statistics.median(by_name[name]),
        "ratio": medians,
        "ratios": ratios,
        "all_seconds": by_name[name],
    }


def table(report: dict[str, Any]) -> str:
    """The report for a reader."""
    head = ["prompt tokens", "vLLM with", "seconds", f"of {NO_CUT}", "each round", f"of {EAGER}"]
    rows = [
        [
            row["input_tokens"],
            row["system"],
            f"{row['seconds']:.3f}",
            f"{row['ratio'][NO_CUT]:.3f}" if NO_CUT in row["ratio"] else "",
            " ".join(f"{ratio:.3f}" for ratio in row["ratios"].get(NO_CUT, [])),
            f"{row['ratio'][EAGER]:.3f}" if EAGER in row["ratio"] else "",
        ]
        for row in report["rows"]
    ]
    told = f"`{report['command']}`\n\n{report['machine']}; vLLM {report['vllm']}, {report['dtype']}\n\n"
    return told + markdown_table(head, rows, "rlrrlr") + "\n"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm-python", required=True, help="python of vLLM's environment")
    parser.add_argument("--input-tokens", type=positive, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_work(parser, WORK, "checkpoints, kept")
    add_report(parser, "OUTPUT.json and .md")
    args = parser.parse_args()
    return run_program(args, lambda: measure(args), table, markdown=True)


if __name__ == "__main__":
    sys.exit(main())
