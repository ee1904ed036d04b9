"""Measure what a step costs beside its graphs, over the number of running sequences.

    python -m perf.engine.scheduler [--running 1 --running 256] [--seconds 1.0] [--engine DIR] [--output OUTPUT]
                                   [--device-ms 5] [--figure FILE]

Everything of ``LLMEngine.step`` runs, on a session whose graphs return at once: expiring, planning, building the
batch, the sampler over float32 logits of 32,000 tokens, committing, appending, ends, statistics, outputs.

- ``decode``: every running sequence decodes.
- ``mixed``: 512-token prompts and 64 tokens of output; whoever ends is replaced, so steps hold decodes and chunks of
  prompts. The cost of ``add_request`` is not in the step; it is reported apart.
- ``drawn``: as ``decode`` with temperature 0.8 and top_p 0.9 for every sequence.

With ``--device-ms`` the engine decodes instead on a device that takes so long for each step, without and with
asynchronous scheduling, and the report says how long it is from one step to the next. Time is virtual: the CPU time of
the engine's only thread, and what it waits for the device. The host samples without asynchronous scheduling, and the
device with it, in no time.

With ``--engine`` that engine also serves 8 prompts of 2048 tokens, 64 tokens of output each, and the report says which
part of its steps' time is spent outside its graphs.
"""

import argparse
import statistics
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
from kvforge.common.figures import check_figure
from kvforge.manifest import SCHEMA_VERSION, Manifest, load_manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.sessions.inputs import LowerStep, UpperStep
from kvforge.runtime.sessions.pools import Pools
from kvforge.runtime.sessions.session import Session, load_session
from model_defs import ModelConfig, RopeConfig
from perf.harness.experiment import Experiment, engine_place, option, output, place, positive, positive_float
from perf.harness.plots import panels
from perf.harness.tables import text_table
from perf.harness.timed_session import TimedSession

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
        model = ModelConfig(
            model_type="llama", vocab_size=VOCAB_SIZE, hidden_size=1024, intermediate_size=2816, num_layers=16,
            num_heads=16, num_kv_heads=4, head_dim=64, rms_norm_eps=1e-6, max_position=MAX_SEQ_LEN, rope=RopeConfig(),
            layer_windows=(0,) * 16, cut=8, bos_token_id=1, eos_token_ids=(2,),
        )  # fmt: skip
        self.manifest = Manifest(
            schema_version=SCHEMA_VERSION, kvforge_version="", target="cpu", isa=(), torch_version="",
            dtype="bfloat16", kv_dtype="bfloat16", kv_scales=(), model=model, page_size=PAGE_SIZE,
            max_num_seqs=num_seqs, max_num_tokens=MAX_NUM_TOKENS, max_seq_len=MAX_SEQ_LEN, max_draft_len=0,
            num_parameters=213_000_000, weight_dtype="bfloat16", weights_file_bytes=0, checkpoint_sha256="",
            operators={}, files={},
        )  # fmt: skip
        self._hidden = torch.zeros(MAX_NUM_TOKENS, 1)
        self._logits = 4 * torch.randn(num_seqs, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def allocate_pools(self, num_pages: int, state_pages: int = 0, num_slots: int | None = None) -> Pools:
        return []

    def lower(self, step: LowerStep, _: Pools) -> Tensor:
        return self._hidden[: len(step.input_ids)]

    def upper(self, step: UpperStep, _: Pools) -> Tensor:
        return self._logits[: len(step.survivor_index)]


class VirtualDevice(InstantSession):
    """Graphs that take ``seconds`` of virtual time a step, one step after the other."""

    runs_ahead = True

    def __init__(self, num_seqs: int, seconds: float) -> None:
        super().__init__(num_seqs)
        self._seconds, self._waited, self._free_at = seconds, 0.0, 0.0
        self.ids = torch.full((num_seqs,), 5, dtype=torch.int32)

    def now(self) -> float:
        """The host's time."""
        return time.thread_time() + self._waited

    def collect(self) -> Tensor:
        """Wait for all that is queued."""
        self._waited += max(self._free_at - self.now(), 0.0)
        return self.ids

    def lower(self, step: LowerStep, pools: Pools) -> Tensor:
        self._free_at = max(self._free_at, self.now()) + self._seconds
        return super().lower(step, pools)

    def device_logits(self, step: UpperStep, pools: Pools) -> Tensor:
        return super().upper(step, pools)

    def upper(self, step: UpperStep, pools: Pools) -> Tensor:
        self.collect()
        return super().upper(step, pools)

    def launch(self, choose: Callable[[], Tensor], num_rows: int) -> "VirtualDevice":
        return self


def period(mode: str, num_running: int, device_ms: float, is_asynchronous: bool) -> float:
    """Return virtual milliseconds from one decode step to the next, the median of 60."""
    session = VirtualDevice(num_running, device_ms / 1e3)
    pages = max(num_running * 8, MAX_SEQ_LEN // PAGE_SIZE)
    engine = LLMEngine(session=session, num_pages=pages, async_scheduling=is_asynchronous)
    for index in range(num_running):
        engine.add_request(str(index), list(range(3, 19)), MODES[mode])
    while engine.stats()["num_decoding"] < num_running:
        engine.step()
    times = []
    for _ in range(60):
        start = session.now()
        engine.step()
        times.append(session.now() - start)
    return 1e3 * statistics.median(times)


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
        "mode": mode, "running": num_running, "steps": len(steps), "step_ms": 1e3 * statistics.median(steps),
        "step_p95_ms": 1e3 * float(np.quantile(steps, 0.95)), "step_mean_ms": 1e3 * statistics.fmean(steps),
        "add_request_us": 1e6 * statistics.median(adds),
    }  # fmt: skip


def measure_overhead(directory: Path) -> dict[str, Any]:
    """Serve a workload of long prompts; returns seconds of all steps, in and outside the graphs."""
    session = TimedSession(load_session(directory, load_manifest(directory)))
    engine = LLMEngine(session=session, enable_prefix_cache=False, kv_cache_gib=1.0)
    workload = Workload("prompt_heavy", 8, 2048, 64)
    warm_up(engine, [workload], seed=0)
    first = engine.num_iterations
    session.seconds.clear()
    total = run_once(engine, workload, np.random.default_rng(0)).total
    graphs = session.seconds.total()
    return {
        "workload": asdict(workload), "steps": engine.num_iterations - first, "total_s": total, "graphs_s": graphs,
        "outside_s": total - graphs, "outside_fraction": 1 - graphs / total,
    }  # fmt: skip


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw median milliseconds a step over running sequences, one curve a mode."""
    with panels(path, 7, 4.5, legend=10) as (axes,):
        for mode in dict.fromkeys(row["mode"] for row in rows):
            points = [(row["running"], row["step_ms"]) for row in rows if row["mode"] == mode]
            axes.plot(*zip(*points, strict=True), "o-", label=mode)
        axes.set(xlabel="running sequences", ylabel="milliseconds a step, graphs excluded", ylim=(0, None))


COLUMNS = (
    ("mode", "mode", "<8"), ("running", "running", ">8"), ("step ms", "step_ms", ">9.3f"),
    ("p95 ms", "step_p95_ms", ">9.3f"), ("mean ms", "step_mean_ms", ">9.3f"),
    ("µs/seq", lambda row: 1e3 * row["step_ms"] / row["running"], ">8.2f"), ("add µs", "add_request_us", ">8.0f"),
)  # fmt: skip


ON_DEVICE = (
    *COLUMNS[:2], ("device ms", "device_ms", ">10.1f"), ("period ms", "sync_ms", ">10.2f"),
    ("asynchronous", "async_ms", ">13.2f"),
)  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """The report for a reader."""
    columns = ON_DEVICE if "device_ms" in report["rows"][0] else COLUMNS
    lines, overhead = [text_table(columns, report["rows"])], report["engine"]
    if overhead:
        lines.append(
            f"8 x 2048 -> 64: {overhead['total_s']:.2f} s in {overhead['steps']} steps, outside the graphs "
            f"{overhead['outside_s']:.3f} s, {overhead['outside_fraction']:.2%}"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every mode with every number of sequences, and an engine where one is given."""
    if args.figure:
        check_figure(args.figure)
    todo = [(mode, n) for mode in args.mode or MODES for n in args.running or RUNNING]
    bar = tqdm(todo, unit="point", disable=True if args.json else None)
    if args.device_ms:
        torch.set_num_threads(1)
        points = [(mode, n, args.device_ms) for mode, n in bar if mode != "mixed"]
        names = "mode", "running", "device_ms", "sync_ms", "async_ms"
        rows = [
            dict(zip(names, (*point, period(*point, False), period(*point, True)), strict=True)) for point in points
        ]
        return {"vocab_size": VOCAB_SIZE, "rows": rows, "engine": None}
    rows = [measure(*item, args.seconds) for item in bar]
    if args.figure:
        plot(rows, args.figure)
    engine = measure_overhead(args.engine) if args.engine else None
    return {"vocab_size": VOCAB_SIZE, "rows": rows, "engine": engine}


EXPERIMENT = Experiment(
    "perf.engine.scheduler", __doc__,
    options=(
        option("--running", type=positive, action="append", help=f"sequences (default: {RUNNING})"),
        option("--mode", action="append", choices=list(MODES), help="default: all"),
        option("--seconds", type=float, default=1.0, help="of each measurement (default %(default)s)"),
        option("--device-ms", type=positive_float, help="of a device's step, to measure asynchronous scheduling"),
        engine_place("--engine", "an engine whose steps are measured too"), place("--figure", "draw the medians here"),
        output("OUTPUT.json"),
    ),
    measure=run, shown=table, is_plain=True, is_dated=True,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
