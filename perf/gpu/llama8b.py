"""Llama-3.1-8B shape, random weights, on one GPU: baseline, cut 16, cut 16 + 4-way AcrossKV, and + FP8 cache.

    PYTHONPATH=. python -m perf.gpu.llama8b --subset --json perf/results/llama8b-h200.json

For each variant and input length: combined tokens/s of many requests in flight (the project's scheduler and graphs,
greedy tokens drawn on the device), normalized TFLOP/s (2 x parameters x combined tokens/s, as arXiv 2410.03960), and
the time to first token (TTFT) and per output token (TPOT) of one request alone. Floors stand beside: FLOPs over the
rate of a large bf16 matrix product, bytes over the bandwidth of a large copy, both measured in the same run.
`--subset` is 8K inputs only. The report is written after each row.
`--device cpu --tiny` goes the same way on a CPU with a model that says nothing about speed.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvforge.bench.workload import FIRST_TOKEN_ID
from kvforge.manifest import Manifest
from kvforge.runtime.config import RuntimeConfig, resolve_config
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.sequence import RequestMetrics, Sequence
from kvforge.runtime.scheduling.scheduler import Scheduler
from kvforge.runtime.sessions.cpu import CpuSession
from kvforge.runtime.sessions.cuda import CudaSession
from kvforge.runtime.sessions.inputs import LowerStep, UpperStep
from kvforge.runtime.sessions.pools import Pools
from kvforge.runtime.sessions.session import Session
from kvforge.runtime.step.runner import Runner
from perf.gpu import costs, models
from perf.gpu.machine import Kept, gpu_parser, machine_rates, parse_checked
from perf.gpu.models import LLAMA_8B, TINY, VARIANTS, Limits
from perf.harness.command import run_main
from perf.harness.options import chosen, flag, option
from perf.harness.tables import text_table


@dataclass(frozen=True)
class Case:
    """``requests`` prompts of ``input_tokens``, ``output_tokens`` each, at most ``concurrency`` at a time."""

    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int

    @property
    def length(self) -> int:
        """Tokens of one finished sequence."""
        return self.input_tokens + self.output_tokens


CASES = (Case(2048, 256, 512, 192), Case(8192, 256, 192, 64), Case(32768, 256, 40, 16), Case(131072, 256, 6, 4))
TINY_CASES = (Case(48, 8, 6, 3), Case(96, 8, 4, 2))


class GreedySession(Session):
    """A session whose ``upper`` returns the most likely tokens ``[R]`` instead of logits, drawn on the device."""

    def __init__(self, session: CudaSession | CpuSession, pools: Pools) -> None:
        self.manifest, self._session, self._pools = session.manifest, session, pools

    def lower(self, step: LowerStep, pools: Pools) -> Tensor:
        return self._session.lower(step, pools)

    def upper(self, step: UpperStep, pools: Pools) -> Tensor:
        logits = self._session.device_logits if isinstance(self._session, CudaSession) else self._session.upper
        return logits(step, pools).argmax(-1).cpu()

    def allocate_pools(self, num_pages: int, state_pages: int = 0, num_slots: int | None = None) -> Pools:
        """Return the pools that all runs share."""
        return self._pools


@dataclass(frozen=True)
class Timing:
    """Seconds: whole run; to the first token of each request; and between its tokens, means over the requests."""

    total: float
    first_token: float
    per_token: float


def run_requests(session: GreedySession, config: RuntimeConfig, case: Case, seed: int = 0) -> Timing:
    """Run all requests of a case, which are there from the start, through the project's scheduler."""
    rng = np.random.default_rng(seed)
    scheduler, runner = Scheduler(config), Runner(session, config)
    params = SamplingParams(temperature=0.0, max_tokens=case.output_tokens, ignore_eos=True)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    start = time.perf_counter()
    for index in range(case.requests):
        prompt = rng.integers(FIRST_TOKEN_ID, config.vocab_size, case.input_tokens, dtype=np.int32)
        metrics = RequestMetrics(0, 0)
        scheduler.add(Sequence(f"r{index}", 0, (0, index, 0), prompt, params, case.length, metrics))
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        tokens = runner.run(plan, scheduler.slots)
        survivors = plan.survivors
        scheduler.commit(plan)
        if tokens is None:
            continue
        scheduler.append(survivors, tokens.tolist())
        now = time.perf_counter() - start
        for sequence in survivors:
            first.setdefault(sequence.request_id, now)
            last[sequence.request_id] = now
            if sequence.length == sequence.max_length:
                scheduler.finish(sequence)
    gaps = [(last[name] - first[name]) / max(case.output_tokens - 1, 1) for name in first]
    return Timing(time.perf_counter() - start, float(np.mean(list(first.values()))), float(np.mean(gaps)))


def floors(manifest: Manifest, case: Case, rates: dict[str, float]) -> dict[str, float]:
    """Return the least seconds of a run: all FLOPs at the GEMM's rate, and all cache reads at the copy's bandwidth;
    and of one request alone: its prompt's FLOPs, and the bytes of weights and cache of one decode token."""
    flops_rate, bytes_rate = rates["bf16_gemm_flops_per_s"], rates["copy_bytes_per_s"]
    contexts = range(case.input_tokens + 1, case.length)
    prompt = costs.prompt_flops(manifest, case.input_tokens)
    flops = case.requests * (prompt + sum(costs.decode_flops(manifest, n) for n in contexts))
    read = case.requests * sum(costs.kv_read_bytes(manifest, n) for n in contexts)
    middle = case.input_tokens + case.output_tokens // 2
    decode_bytes = manifest.weight_bytes + costs.kv_read_bytes(manifest, middle)
    return {
        "flops_floor_s": flops / flops_rate,
        "kv_bytes_floor_s": read / bytes_rate,
        "ttft_floor_s": prompt / flops_rate,
        "tpot_floor_s": decode_bytes / bytes_rate,
    }


def bench_variant(
    name: str, shape: dict[str, Any], cases: tuple[Case, ...], device: str, work: Path, rates: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """Yield one row per case."""
    config, options = _model(name, shape, device)
    manifest = models.manifest_of(config, options)
    weights = models.random_weights(config, options)
    session = models.open_session(manifest, weights, work / name)
    base = models.num_parameters(models.model_config(shape, VARIANTS["baseline"]))
    for case in cases:
        pages = case.concurrency * -(-case.length // manifest.page_size)
        runtime = resolve_config(manifest, 0, num_pages=pages, max_num_seqs=case.concurrency, enable_prefix_cache=False)
        pools = session.allocate_pools(pages)
        if isinstance(session, CudaSession):
            session.warm_up(pools, case.length, case.concurrency)
        greedy = GreedySession(session, pools)
        alone = replace(case, requests=1, concurrency=1)
        run_requests(greedy, runtime, replace(alone, output_tokens=2))
        single = run_requests(greedy, runtime, alone)
        many = run_requests(greedy, runtime, case)
        rate = case.requests * case.length / many.total
        yield {
            "variant": name, **asdict(case), "total_s": many.total, "combined_tok_s": rate,
            "normalized_tflops": costs.normalized_tflops(base, rate), "ttft_s": single.first_token,
            "tpot_s": single.per_token, "loaded_ttft_s": many.first_token, "loaded_tpot_s": many.per_token,
            "kv_bytes_per_token": manifest.kv_bytes_per_token, **floors(manifest, case, rates),
        }  # fmt: skip
        del pools, greedy
        if device == "cuda":
            torch.cuda.empty_cache()


def _model(name: str, shape: dict[str, Any], device: str) -> tuple[Any, Any]:
    """The model and options of a variant."""
    config = models.model_config(shape, VARIANTS[name])
    return config, models.resolved_options(config, VARIANTS[name], limits_of(shape, device), device)


def shape_of(tiny: bool) -> dict[str, Any]:
    """Return the model's shape."""
    return TINY if tiny else LLAMA_8B


def limits_of(shape: dict[str, Any], device: str) -> Limits:
    """Return an engine's limits, for the longest inputs, so that one engine serves all cases."""
    cases = TINY_CASES if shape is TINY else CASES
    return Limits(
        max_num_seqs=max(case.concurrency for case in cases),
        max_num_tokens=8192 if device == "cuda" else 64,
        max_seq_len=max(case.length for case in cases),
        page_size=64 if device == "cuda" else 16,
    )


def compile_all(names: list[str], options: argparse.Namespace) -> None:
    """Compile the variants, several in processes of their own, all at once: code generation runs on one core each."""
    if len(names) == 1:
        compile_variant(names[0], options)
        return
    command = [sys.executable, "-m", "perf.gpu.llama8b", "--device", options.device, "--work", str(options.work)]
    command += ["--tiny"] if options.tiny else []
    running = []
    for name in names:
        running.append((name, subprocess.Popen([*command, "--compile-only", name])))
        if len(running) == options.jobs:
            _wait(running)
    _wait(running)


def compile_variant(name: str, options: argparse.Namespace) -> None:
    """Compile a variant in this process."""
    config, resolved = _model(name, shape_of(options.tiny), options.device)
    models.compile_graphs(config, resolved, options.work / options.device / name)


def _wait(running: list[tuple[str, subprocess.Popen]]) -> None:
    failed = [name for name, process in running if process.wait()]
    running.clear()
    if failed:
        sys.exit(f"Compiling {', '.join(failed)} failed; see above.")


COLUMNS = (
    ("variant", "variant", "<16"), ("input", "input_tokens", ">8.0f"), ("tok/s", "combined_tok_s", ">9.0f"),
    ("norm TFLOPS", "normalized_tflops", ">12.1f"), ("total s", "total_s", ">8.2f"),
    ("FLOP floor s", "flops_floor_s", ">13.2f"), ("KV floor s", "kv_bytes_floor_s", ">11.2f"),
    ("TTFT ms", "ttft_s", ">9.1f", 1e3), ("floor", "ttft_floor_s", ">9.1f", 1e3), ("TPOT ms", "tpot_s", ">9.2f", 1e3),
    ("floor", "tpot_floor_s", ">7.2f", 1e3),
)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    return text_table(COLUMNS, rows, gap="")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = gpu_parser(
        __doc__, "llama8b", "inputs", flag("--subset", "8K inputs only"),
        chosen("--variants", tuple(VARIANTS), f"of {', '.join(VARIANTS)} (default: all)", "NAME"),
        option("--inputs", nargs="+", type=int, help="input lengths (default: all)"),
        option("--requests", type=int, help="requests of each case, all in flight (default: the case's)"),
        option("--jobs", type=int, default=4, help="variants that are compiled at once"),
        option("--compile-only", choices=tuple(VARIANTS), help=argparse.SUPPRESS),
    )  # fmt: skip
    return parse_checked(parser, arguments)


def selected_cases(options: argparse.Namespace) -> tuple[Case, ...]:
    """Return the cases that the command line asks for."""
    cases = TINY_CASES if options.tiny else CASES
    wanted = options.inputs or ([cases[1].input_tokens] if options.subset else [c.input_tokens for c in cases])
    unknown = set(wanted) - {case.input_tokens for case in cases}
    if unknown:
        sys.exit(f"There is no case of {sorted(unknown)} input tokens; choose {[c.input_tokens for c in cases]}.")
    chosen = tuple(case for case in cases if case.input_tokens in wanted)
    if options.requests is None:
        return chosen
    return tuple(
        replace(case, requests=options.requests, concurrency=min(case.concurrency, options.requests)) for case in chosen
    )


def main(arguments: list[str] | None = None) -> None:
    """Compile, measure, print a table and write the report."""
    options = parse_arguments(arguments)
    shape = shape_of(options.tiny)
    work = options.work / options.device
    if options.compile_only:
        compile_variant(options.compile_only, options)
        return
    cases = selected_cases(options)
    started = time.perf_counter()
    compile_all(options.variants, options)
    compiled = time.perf_counter() - started
    rates = machine_rates(options.device)
    kept = Kept("perf.gpu.llama8b", arguments, options, COLUMNS, "", compile_s=compiled, **rates)
    for name in options.variants:
        for row in bench_variant(name, shape, cases, options.device, work, rates):
            kept.add(row)
    print("\n" + kept.table())


if __name__ == "__main__":
    raise SystemExit(run_main(main))
