"""vLLM with a SwiftKV cut, by kvforge's plugin, beside vLLM without one: seconds until the first token, by turns.

    python -m perf.peers.vllm_cut --vllm-python VENV/bin/python --output perf/results/vllm-cut

The 213M shape with random weights: without a cut as vLLM runs it (compiled) and as it is written (eager, which models
with a cut are too), and with a cut at half and 4-way AcrossKV above it. All stay loaded, each in a process of its own;
in a round each has the same prompt, and who goes first changes with the round. The ratio is that of a round.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvforge.bench.workload import Workload
from kvforge.vllm_engine.environment import in_interpreter, probe
from kvforge.vllm_engine.vllm_core import UNCOMPILED
from model_defs import families
from perf.harness.experiment import Experiment, chosen, number, numbers, option, output, work
from perf.harness.random_checkpoint import LLAMA_213M
from perf.harness.rounds import turned
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
        "dtype": dtype, "enforce_eager": name == EAGER, "kv_sharing_fast_prefill": variant.cut is not None,
        "hf_overrides": {"architectures": [architecture]}, "skip_tokenizer_init": True,
    }  # fmt: skip
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
            for workload in workloads:
                for name in turned(args.systems, turn):
                    times = workers[name].run(workload, turn)
                    runs[workload.input_tokens][name].append(times["ttft_s"])
    finally:
        for worker in workers.values():
            worker.close()
    rows = [row_of(length, name, by_name) for length, by_name in runs.items() for name in by_name]
    return {"vllm": found.vllm, "rows": rows}


def row_of(length: int, name: str, by_name: dict[str, list[float]]) -> dict[str, Any]:
    """Return a system's seconds at one length, and by round its share of those of vLLM without a cut."""
    ratios = {
        of: [mine / other for mine, other in zip(by_name[name], by_name[of], strict=True)]
        for of in (NO_CUT, EAGER)
        if of in by_name and of != name
    }
    medians = {of: statistics.median(values) for of, values in ratios.items()}
    return {
        "input_tokens": length, "system": name, "seconds": statistics.median(by_name[name]), "ratio": medians,
        "ratios": ratios, "all_seconds": by_name[name],
    }  # fmt: skip


def of(name: str) -> Callable[[dict[str, Any]], str]:
    """Return the value of a column that is the ratio to another system, where there is one."""
    return lambda row: f"{row['ratio'][name]:.3f}" if name in row["ratio"] else ""


EXPERIMENT = Experiment(
    "perf.peers.vllm_cut", __doc__,
    options=(
        option("--vllm-python", required=True, help="python of vLLM's environment"),
        numbers("--input-tokens", [512, 2048]), number("--rounds", 5),
        chosen("--systems", list(SYSTEMS), metavar="NAME"),
        option("--dtype", choices=("float32", "bfloat16"), default="float32"), work(WORK, "checkpoints, kept"),
        output("OUTPUT.json and .md"),
    ),
    measure=measure, settings=("dtype",), notes="vLLM {vllm}, {dtype}.", align="rlrrlr",
    columns=(
        ("prompt tokens", "input_tokens"), ("vLLM with", "system"), ("seconds", "seconds", ".3f"),
        (f"of {NO_CUT}", of(NO_CUT)),
        ("each round", lambda row: " ".join(f"{ratio:.3f}" for ratio in row["ratios"].get(NO_CUT, []))),
        (f"of {EAGER}", of(EAGER)),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
