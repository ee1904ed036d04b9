"""Measure what a step costs beside its graphs, over the number of running sequences.

    python -m perf.engine.scheduler [--running 1 --running 256] [--seconds 1.0] [--engine DIR] [--output FILE]
                                   [--figure FILE]

Everything of ``LLMEngine.step`` runs, on a session whose graphs return at once: expiring, planning, building the
batch, the sampler over float32 logits of 32,000 tokens, committing, appending, ends, statistics, outputs.

- ``decode``: every running sequence decodes.
- ``mixed``: 512-token prompts and 64 tokens of output; whoever ends is replaced, so steps hold decodes and chunks of
  prompts. The cost of ``add_request`` is not in the step; it is reported apart.
- ``drawn``: as ``decode`` with temperature 0.8 and top_p 0.9 for every sequence.

With ``--engine`` that engine also serves 8 prompts of 2048 tokens, 64 tokens of output each, and the report says which
part of its steps' time is spent outside its graphs.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvforge.bench.workload import Workload, run_once, warm_up
from kvforge.engine import SCHEMA_VERSION, Manifest, load_manifest
from kvforge.errors import KvforgeError
from kvforge.figures import check_figure, new_figure, save_figure
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.pools import Pools
from kvforge.runtime.session import Session, load_session
from kvforge.runtime.step_inputs import LowerStep, UpperStep

RUNNING = (1, 8, 32, 64, 128, 256, 512)
VOCAB_SIZE = 32_000
MAX_NUM_TOKENS = 2048
MAX_SEQ_LEN = 4096
PAGE_SIZE = 32
PROMPT, OUTPUT = 512, 64
MODES = {
    "decode": SamplingParams(temperature=0.0, max_tokens=MAX_SEQ_LEN, ignore_eos=True),
    "mixed": SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=MAX_SEQ_LEN, ignore_eos=True),
}


class InstantSession(Session):
    """Graphs that return what was made before."""

    def __init__(self, num_seqs: int) -> None:
        self.manifest = Manifest(
            schema_version=SCHEMA_VERSION, kvforge_version="", target="cpu", isa=(), torch_version="",
            dtype="bfloat16", kv_dtype="bfloat16", kv_scales=(), model_type="llama", num_layers=16,
            hidden_size=1024, intermediate_size=2816, num_heads=16, num_kv_heads=4, head_dim=64,
            vocab_size=VOCAB_SIZE, max_position=MAX_SEQ_LEN, layer_windows=(0,) * 16, cut=8,
            owner_of_layer=tuple(range(16)), early_exit=False, page_size=PAGE_SIZE, max_num_seqs=num_seqs,
            max_num_tokens=MAX_NUM_TOKENS, max_seq_len=MAX_SEQ_LEN, max_draft_len=0, bos_token_id=1,
            eos_token_ids=(2,), num_parameters=213_000_000, weight_dtype="bfloat16", weights_file_bytes=0,
            checkpoint_sha256="", operators={}, files={},
        )  # fmt: skip
        self._hidden = torch.zeros(MAX_NUM_TOKENS, 1)
        self._logits = 4 * torch.randn(num_seqs, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def allocate_pools(self, num_pages: int, state_pages: int = 0, num_slots: int | None = None) -> Pools:
        return []

    def lower(self, step: LowerStep, _: Pools) -> Tensor:
        return self._hidden[: len(step.input_ids)]

    def upper(self, step: UpperStep, _: Pools) -> Tensor:
        return self._logits[: len(step.survivor_index)]


def measure(mode: str, num_running: int, seconds: float) -> dict[str, Any]:
    """Run steps of a steady state for so many seconds, 20 at least; returns medians and 95th percentiles."""
    pages = num_running * (MAX_SEQ_LEN // PAGE_SIZE)
    engine = LLMEngine(session=InstantSession(num_running), num_pages=pages)
    rng, params = np.random.default_rng(0), MODES[mode]
    prompt_length, backlog = (PROMPT, MAX_NUM_TOKENS // PROMPT) if mode == "mixed" else (16, 0)
    steps: list[float] = []
    adds: list[float] = []
    num_added, warm = 0, False
    end = float("inf")
    while len(steps) < 20 or time.perf_counter() < end:
        while len(engine.requests) < num_running + backlog:
            prompt = rng.integers(3, VOCAB_SIZE, prompt_length)
            start = time.perf_counter()
            engine.add_request(str(num_added), prompt, params)
            adds.append(time.perf_counter() - start)
            num_added += 1
        start = time.perf_counter()
        engine.step()
        elapsed = time.perf_counter() - start
        if warm:
            steps.append(elapsed)
        # Two generations of sequences make their ends uneven; a decode step needs no such thing.
        elif num_added > 2 * num_running + backlog or (mode != "mixed" and engine.num_iterations > 5):
            warm, end = True, time.perf_counter() + seconds
        if mode != "mixed" and engine.num_iterations > MAX_SEQ_LEN - 64:
            break
    return {
        "mode": mode,
        "running": num_running,
        "steps": len(steps),
        "step_ms": 1e3 * statistics.median(steps),
        "step_p95_ms": 1e3 * float(np.quantile(steps, 0.95)),
        "step_mean_ms": 1e3 * statistics.fmean(steps),
        "add_request_us": 1e6 * statistics.median(adds),
    }


class TimedSession(Session):
    """A session that adds up the seconds spent in its graphs."""

    def __init__(self, session: Session) -> None:
        self._session, self.manifest, self.seconds = session, session.manifest, 0.0

    def allocate_pools(self, num_pages: int, state_pages: int = 0, num_slots: int | None = None) -> Pools:
        return self._session.allocate_pools(num_pages)

    def lower(self, step: LowerStep, pools: Pools) -> Tensor:
        return self._timed(self._session.lower, step, pools)

    def upper(self, step: UpperStep, pools: Pools) -> Tensor:
        return self._timed(self._session.upper, step, pools)

    def _timed(self, graph: Callable[..., Tensor], *arguments: Any) -> Tensor:
        start = time.perf_counter()
        result = graph(*arguments)
        self.seconds += time.perf_counter() - start
        return result


def measure_overhead(directory: Path) -> dict[str, Any]:
    """Serve a workload of long prompts; returns seconds of all steps, in and outside the graphs."""
    session = TimedSession(load_session(directory, load_manifest(directory)))
    engine = LLMEngine(session=session, enable_prefix_cache=False, kv_cache_gib=1.0)
    workload = Workload("prompt_heavy", 8, 2048, 64)
    warm_up(engine, [workload], seed=0)
    session.seconds, first = 0.0, engine.num_iterations
    _, total = run_once(engine, workload, np.random.default_rng(0))
    outside = total - session.seconds
    return {
        "workload": asdict(workload),
        "steps": engine.num_iterations - first,
        "total_s": total,
        "graphs_s": session.seconds,
        "outside_s": outside,
        "outside_fraction": outside / total,
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw median milliseconds a step over running sequences, one curve a mode."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    for mode in dict.fromkeys(row["mode"] for row in rows):
        points = [(row["running"], row["step_ms"]) for row in rows if row["mode"] == mode]
        axes.plot(*zip(*points, strict=True), "o-", label=mode)
    axes.set(xlabel="running sequences", ylabel="milliseconds a step, graphs excluded", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def main() -> None:
    """Parse the command line, measure, print a table and write the report."""
    parser = argparse.ArgumentParser(description="Measure the cost of a step beside its graphs.")
    parser.add_argument("--running", type=int, action="append", help=f"sequences (default: {RUNNING})")
    parser.add_argument("--mode", action="append", choices=list(MODES), help="default: all")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement (default %(default)s)")
    parser.add_argument("--engine", type=Path, help="an engine whose steps are measured too")
    parser.add_argument("--output", type=Path, help="write the report here as JSON")
    parser.add_argument("--figure", type=Path, help="draw the medians here")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args()
    if any(count < 1 for count in args.running or ()):
        parser.error("--running is at least 1")
    if args.figure:
        check_figure(args.figure)
    todo = [(mode, n) for mode in args.mode or MODES for n in args.running or RUNNING]
    rows = [measure(*item, args.seconds) for item in tqdm(todo, unit="point", disable=True if args.json else None)]
    overhead = measure_overhead(args.engine) if args.engine else None
    report = {
        "command": "python -m perf.engine.scheduler " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "vocab_size": VOCAB_SIZE,
        "rows": rows,
        "engine": overhead,
    }
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"{'mode':<8} {'running':>8} {'step ms':>9} {'p95 ms':>9} {'mean ms':>9} {'µs/seq':>8} {'add µs':>8}")
        for row in rows:
            print(
                f"{row['mode']:<8} {row['running']:>8} {row['step_ms']:>9.3f} {row['step_p95_ms']:>9.3f} "
                f"{row['step_mean_ms']:>9.3f} {1e3 * row['step_ms'] / row['running']:>8.2f} "
                f"{row['add_request_us']:>8.0f}"
            )
        if overhead:
            print(
                f"8 x 2048 -> 64: {overhead['total_s']:.2f} s in {overhead['steps']} steps, outside the graphs "
                f"{overhead['outside_s']:.3f} s, {overhead['outside_fraction']:.2%}"
            )
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    if args.figure:
        plot(rows, args.figure)


if __name__ == "__main__":
    try:
        main()
    except KvforgeError as error:
        sys.exit(f"{error}")
