"""Ten times the load that a server can carry, for two minutes: is every request answered or refused, and nothing grows?

    python -m perf.serving.overload [--seconds 120] [--factor 10] [--output perf/results/serving-overload]

First the peak is measured with a closed loop of --concurrency requests, before and after. Then requests are offered
at --factor times that rate whatever becomes of them (open loop, over many connections). Exits with 1 when a request
got neither an answer nor a refusal in words, the queue went over its bound, memory grew past --max-growth-mib, or the
throughput of whole answers fell more than 10% under the peak.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvforge.demo.run import STUDENT
from kvforge.manifest import load_manifest
from kvforge.serving.health.probe import read_metrics
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from perf.harness.engines import tokenizer_of
from perf.harness.experiment import (
    Experiment,
    engine_place,
    lengths,
    number,
    option,
    output,
    place,
    positive_float,
    work,
)
from perf.harness.tables import text_table
from perf.serving.load.client import ERROR, Answer, LoadClient, ask_text, infer_request
from perf.serving.load.engines import tiny_engine
from perf.serving.load.memory import MemoryLog
from perf.serving.load.processes import CLIENT, CpuWindow, server_processes
from perf.serving.load.prompts import make_prompts

MODEL = "ensemble"
KV_CACHE_GIB = 0.5
ANSWER_TIMEOUT_S = 120.0
METRICS_PERIOD_S = 1.0
RAMP_S = 5.0
ACTIVE = 'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="%s",version="1"}'
MIN_OF_PEAK = 0.9


@dataclass
class Phase:
    """What came of the requests of one phase; ``outcomes`` counts OK, refusals by their words, and unanswered."""

    seconds: float = 0.0
    offered: int = 0
    outcomes: Counter = field(default_factory=Counter)
    output_tokens: float = 0.0
    unclear: int = 0
    max_refusal_s: float = 0.0

    def add(self, answer: Answer, tokens: int, begin: float, end: float) -> None:
        """Count an answer; of its tokens those that came between ``begin`` and ``end``."""
        if answer.code == "OK":
            self.outcomes["OK"] += 1
            inside = sum(begin <= arrival <= end for arrival in answer.arrivals)
            self.output_tokens += tokens * inside / len(answer.arrivals)
        elif answer.code == ERROR and answer.message:
            self.outcomes[answer.message[:80]] += 1
            self.max_refusal_s = max(self.max_refusal_s, answer.ended - answer.sent)
        else:
            self.outcomes[f"{answer.code} {answer.message[:80]}"] += 1
            self.unclear += 1

    @property
    def output_tok_s(self) -> float:
        return self.output_tokens / self.seconds


class Load:
    """Sends the same few prepared requests over and over."""

    def __init__(self, server: TritonServer, requests: list[Any], output_tokens: int, num_connections: int) -> None:
        self._client = LoadClient(server.grpc_url, num_connections)
        self._requests, self._output_tokens = requests, output_tokens
        self._rng = random.Random(0)

    async def closed(self, seconds: float, concurrency: int) -> Phase:
        """Keep ``concurrency`` requests open for ``seconds``."""
        begin = time.monotonic()
        phase, end = Phase(seconds), begin + seconds

        async def worker() -> None:
            while time.monotonic() < end:
                await self._one(phase, begin, end)

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return phase

    async def open(self, seconds: float, rate: float) -> Phase:
        """Offer ``rate`` requests a second at random moments for ``seconds``, then wait for all outcomes; the
        throughput is that after the first RAMP_S."""
        phase, tasks = Phase(seconds - RAMP_S), set()
        now = start = told = time.monotonic()
        end, due = start + seconds, start
        while now < end:
            while due <= now:
                task = asyncio.create_task(self._one(phase, start + RAMP_S, end))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                due += self._rng.expovariate(rate)
            if now - told >= 15:
                told = now
                print(f"  {now - start:.0f} s: {phase.offered} offered, {phase.outcomes['OK']} answered, "
                      f"{len(tasks)} open", file=sys.stderr, flush=True)  # fmt: skip
            await asyncio.sleep(max(0.0, min(due - time.monotonic(), 0.05)))
            now = time.monotonic()
        if tasks:
            await asyncio.wait(tasks, timeout=ANSWER_TIMEOUT_S)
        for task in tasks:
            phase.unclear += 1
            phase.outcomes["no answer"] += 1
            task.cancel()
        return phase

    async def _one(self, phase: Phase, begin: float, end: float) -> None:
        phase.offered += 1
        answer = await self._client.ask(self._rng.choice(self._requests))
        phase.add(answer, self._output_tokens, begin, end)

    async def close(self) -> None:
        await self._client.close()


async def watch_queue(server: TritonServer, seen: dict[str, float]) -> None:
    """Keep the greatest number of waiting and of active sequences that the metrics showed."""
    while True:
        metrics = await asyncio.to_thread(read_metrics, server.metrics_url)
        for kind in ("waiting", "active"):
            seen[kind] = max(seen.get(kind, 0.0), metrics[ACTIVE % kind])
        await asyncio.sleep(METRICS_PERIOD_S)


async def overload(server: TritonServer, requests: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Peak, overload, peak again; returns what was measured."""
    load = Load(server, requests, args.output_tokens, args.connections)
    memory, seen = MemoryLog(lambda: server_processes(server.pid), period_s=1.0), {}
    await load.closed(3.0, args.concurrency)
    before = await load.closed(args.peak_seconds, args.concurrency)
    rate = args.factor * before.outcomes["OK"] / before.seconds
    print(f"peak {before.output_tok_s:.0f} tokens/s; offering {rate:.0f} requests/s ...", file=sys.stderr, flush=True)
    watchers = [asyncio.create_task(memory.run()), asyncio.create_task(watch_queue(server, seen))]
    window = CpuWindow(server.pid)
    during = await load.open(args.seconds, rate)
    cpu = {role: sum(threads) for role, threads in window.read().items()}
    for watcher in watchers:
        watcher.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)
    after = await load.closed(args.peak_seconds, args.concurrency)
    await load.close()
    growth = {role: samples[-1][1] - samples[0][1] for role, samples in memory.samples.items()}
    return {
        "offered_requests_s": rate, "peak_before_tok_s": before.output_tok_s, "overload_tok_s": during.output_tok_s,
        "peak_after_tok_s": after.output_tok_s, "offered": during.offered, "outcomes": dict(during.outcomes),
        "unclear": before.unclear + during.unclear + after.unclear, "slowest_refusal_s": during.max_refusal_s,
        "max_waiting": seen.get("waiting"), "max_active": seen.get("active"), "cpu_s": cpu, "pss_growth_mib": growth,
        "pss_peak_mib": memory.peak_mib(),
    }  # fmt: skip


def problems_of(report: dict[str, Any], max_active: int, max_growth_mib: float) -> list[str]:
    """Sentences for what was not kept; none when all is well."""
    problems = []
    if report["unclear"]:
        problems.append(f"{report['unclear']} requests got neither an answer nor a refusal in words")
    if report["max_active"] is None or report["max_active"] > max_active:
        problems.append(f"{report['max_active']} sequences were active, {max_active} is the bound")
    for role, growth in report["pss_growth_mib"].items():
        if growth > max_growth_mib:
            problems.append(f"{role} grew by {growth:.0f} MiB, {max_growth_mib:.0f} is the bound")
    peak = min(report["peak_before_tok_s"], report["peak_after_tok_s"])
    if report["overload_tok_s"] < MIN_OF_PEAK * peak:
        problems.append(f"throughput fell to {report['overload_tok_s'] / peak:.0%} of its peak")
    return problems


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole measurement; returns the report with its ``problems``."""
    engine = args.engine or tiny_engine(args.work, STUDENT)
    prompts = make_prompts(tokenizer_of(engine), load_manifest(engine).vocab_size, 64, args.input_tokens, seed=0)
    requests = [
        infer_request(MODEL, ask_text(prompt, args.output_tokens, end_id=-1), "text_output") for prompt in prompts
    ]
    options = ServerOptions(
        kv_cache_gib=KV_CACHE_GIB, max_num_seqs=args.max_num_seqs, max_queue_size=args.max_queue_size,
        enable_prefix_cache=False, log_file=args.log_file,
    )  # fmt: skip
    with TritonServer(engine, options) as server:
        numbers = asyncio.run(overload(server, requests, args))
        failure = server.failure()
    problems = problems_of(numbers, args.max_num_seqs + args.max_queue_size, args.max_growth_mib)
    return {**numbers, "problems": [*([failure] if failure else []), *problems]}


COLUMNS = (
    ("process", "role", "<24"), ("peak PSS MiB", "peak", ">13"), ("growth MiB", "growth", ">11"),
    ("CPU s", "cpu", ">8.1f"),
)  # fmt: skip


def show(report: dict[str, Any]) -> str:
    """The report for a reader."""
    peaks = report["peak_before_tok_s"], report["peak_after_tok_s"]
    growth, peak = report["pss_growth_mib"], report["pss_peak_mib"]
    roles = [{"role": role, "growth": f"{growth[role]:+.1f}", "peak": f"{peak[role]:.1f}"} for role in growth]
    roles.append({"role": CLIENT, "growth": "-", "peak": "-"})
    roles = [row | {"cpu": report["cpu_s"][row["role"]]} for row in roles]
    lines = [
        f"{report['offered']} requests at {report['offered_requests_s']:.0f}/s, {report['factor']:g} times the peak, "
        f"for {report['seconds']:g} s:",
        *(f"  {count:>7} {outcome}" for outcome, count in sorted(report["outcomes"].items(), key=lambda x: -x[1])),
        f"slowest refusal {report['slowest_refusal_s']:.2f} s; at most {report['max_active']:.0f} sequences active, "
        f"{report['max_waiting']:.0f} of them waiting",
        f"output tokens/s: {report['overload_tok_s']:.0f} under overload; peak {peaks[0]:.0f} before, {peaks[1]:.0f} "
        f"after ({report['overload_tok_s'] / min(peaks):.0%} of the lower one)",
        text_table(COLUMNS, roles),
    ]
    return "\n".join([*lines, *(f"FAILED: {problem}" for problem in report["problems"])])


def check(args: argparse.Namespace) -> str | None:
    """Say what cannot be asked for."""
    told = f"--seconds is {args.seconds:g}: the first {RAMP_S:g} do not count, so give more"
    return told if args.seconds <= RAMP_S else None


EXPERIMENT = Experiment(
    "perf.serving.overload", __doc__,
    options=(
        option("--seconds", type=positive_float, default=120.0),
        option("--factor", type=positive_float, default=10.0, help="offered rate over the peak's (default 10)"),
        option("--peak-seconds", type=positive_float, default=20.0, help="of each closed loop (default 20)"),
        number("--concurrency", 32, "of the closed loops (default 32)"), number("--connections", 64),
        number("--max-num-seqs", 32), option("--max-queue-size", type=int, default=64),
        option("--max-growth-mib", type=positive_float, default=256.0, help="of any process (default 256)"),
        lengths(128, 32), engine_place("--engine", "default: the demo's tiny SwiftKV student"), work(),
        place("--log-file", "keep the server's log here"), output("OUTPUT.json"),
    ),
    measure=run, settings=("seconds", "factor"), check=check, shown=show, is_plain=True,
    failed=lambda report: report["problems"],
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
