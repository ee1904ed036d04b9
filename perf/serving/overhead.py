"""What serving costs: the same requests through `ensemble` (gRPC, streamed) and offline, alternating in one sitting.

    python -m perf.serving.overhead [--model 213m|tiny] [--variant "no cut"] [--num-runs 2] [--output FILE]

Prints the throughput of both, their ratio, and where the processor time of a served run went. Offline is
kvforge.LLM.generate on the same texts with the same limits; neither side reuses prompt starts.
"""

import argparse
import asyncio
import gc
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.manifest import load_manifest
from kvforge.runtime.llm import LLM
from kvforge.runtime.requests.params import SamplingParams
from kvforge.serving.health.probe import read_metrics
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from perf.harness.command import add_lengths, add_report, add_work, begin_report, make_parser, positive, run_program
from perf.harness.engines import tokenizer_of
from perf.serving.load.client import ask_all, ask_text, infer_request
from perf.serving.load.engines import TINY, VARIANTS_213M, engine_213m, tiny_engine
from perf.serving.load.processes import CpuWindow
from perf.serving.load.prompts import make_prompts

KV_CACHE_GIB = 1.0
ITERATIONS = 'nv_trt_llm_general_metrics{general_type="iteration_counter",model="tensorrt_llm",version="1"}'


@dataclass(frozen=True)
class Run:
    """One side's pass over all requests: seconds, engine steps, responses and processor seconds by process."""

    total_s: float
    ttft_s: float
    num_steps: int
    num_responses: int = 0
    cpu_s: dict[str, list[float]] | None = None


def run_offline(llm: LLM, prompts: list[str], max_tokens: int) -> Run:
    """All prompts at once; TTFT is not measured (0)."""
    steps = llm.engine.num_iterations
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    total = time.perf_counter() - started
    _check_lengths([len(output.outputs[0].token_ids) for output in outputs], max_tokens)
    return Run(total, 0.0, llm.engine.num_iterations - steps)


def run_served(server: TritonServer, prompts: list[str], max_tokens: int, concurrency: int) -> Run:
    """``concurrency`` requests at a time over one connection."""
    requests = [infer_request("ensemble", ask_text(prompt, max_tokens, end_id=-1), "text_output") for prompt in prompts]
    window, steps = CpuWindow(server.pid), read_metrics(server.metrics_url)[ITERATIONS]
    answers, total = asyncio.run(ask_all(server.grpc_url, requests, concurrency))
    cpu = window.read()
    time.sleep(1.5)  # until the metrics have caught up
    steps = read_metrics(server.metrics_url)[ITERATIONS] - steps
    ttft = statistics.median(answer.arrivals[0] - answer.sent for answer in answers)
    return Run(total, ttft, int(steps), sum(len(answer.arrivals) for answer in answers), cpu)


def _check_lengths(lengths: list[int], wanted: int) -> None:
    if any(length != wanted for length in lengths):
        raise KvforgeError(f"an answer has {min(lengths)} tokens where {wanted} were forced")


def measure(engine: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Alternate both sides ``num_runs`` times, after one short warm-up of each; returns the report."""
    tokenizer, vocab = tokenizer_of(engine), load_manifest(engine).vocab_size
    num = args.requests

    def prompts(seed: int) -> list[str]:
        return make_prompts(tokenizer, vocab, num, args.input_tokens, seed)

    offline, served = [], []
    options = ServerOptions(kv_cache_gib=KV_CACHE_GIB, enable_prefix_cache=False)
    with TritonServer(engine, options) as server:
        llm = LLM(engine, kv_cache_gib=KV_CACHE_GIB, enable_prefix_cache=False)
        warm = prompts(10**6)[:2]
        run_offline(llm, warm, 8)
        run_served(server, warm, 8, 2)
        for seed in range(args.num_runs):
            gc.collect()
            served.append(run_served(server, prompts(seed), args.output_tokens, args.concurrency))
            _progress("served", served[-1])
            offline.append(run_offline(llm, prompts(seed), args.output_tokens))
            _progress("offline", offline[-1])
    tokens = num * (args.input_tokens + args.output_tokens)
    medians = {name: statistics.median(run.total_s for run in runs) for name, runs in
               (("offline", offline), ("served", served))}  # fmt: skip
    middle = min(served, key=lambda run: abs(run.total_s - medians["served"]))
    return {
        **begin_report("perf.serving.overhead"),
        "requests": num,
        "concurrency": args.concurrency,
        "input_tokens": args.input_tokens,
        "output_tokens": args.output_tokens,
        "offline_s": medians["offline"],
        "served_s": medians["served"],
        "offline_tok_s": tokens / medians["offline"],
        "served_tok_s": tokens / medians["served"],
        "served_output_tok_s": num * args.output_tokens / medians["served"],
        "served_responses_s": middle.num_responses / middle.total_s,
        "served_to_offline": medians["offline"] / medians["served"],
        "offline_step_ms": 1e3 * statistics.median(run.total_s / run.num_steps for run in offline),
        "served_step_ms": 1e3 * statistics.median(run.total_s / max(1, run.num_steps) for run in served),
        "cpu_s": middle.cpu_s,
        "runs": {"offline": [asdict(run) for run in offline], "served": [asdict(run) for run in served]},
    }


def _progress(name: str, run: Run) -> None:
    print(f"  {name}: {run.total_s:.2f} s, {run.num_steps} steps", file=sys.stderr, flush=True)


def table(report: dict[str, Any]) -> str:
    """The report for a reader."""
    lines = [
        f"{report['requests']} requests of {report['input_tokens']} -> {report['output_tokens']} tokens, "
        f"{report['concurrency']} at a time",
        f"{'':<10} {'seconds':>9} {'tok/s':>9} {'ms/step':>9}",
        *(
            f"{side:<10} {report[f'{side}_s']:>9.2f} {report[f'{side}_tok_s']:>9.0f} {report[f'{side}_step_ms']:>9.2f}"
            for side in ("offline", "served")
        ),
        f"served / offline: {report['served_to_offline']:.3f} of the throughput; {report['served_output_tok_s']:.0f} "
        f"output tokens/s in {report['served_responses_s']:.0f} responses/s",
        "processor seconds of a served run, by process and its busiest threads:",
    ]
    for role, threads in sorted(report["cpu_s"].items(), key=lambda item: -sum(item[1])):
        lines.append(f"  {role:<24} {sum(threads):>8.2f}   {' '.join(f'{seconds:.2f}' for seconds in threads[:5])}")
    return "\n".join(lines)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=("213m", "tiny"), default="213m")
    parser.add_argument("--variant", help=f"213m: one of {', '.join(VARIANTS_213M)}; tiny: one of {', '.join(TINY)}")
    add_work(parser)
    parser.add_argument("--requests", type=positive, default=32)
    parser.add_argument("--concurrency", type=positive, default=32)
    add_lengths(parser, 1024, 64)
    parser.add_argument("--num-runs", type=positive, default=2, help="of which medians are reported (default 2)")
    add_report(parser, "OUTPUT.json")
    args = parser.parse_args()
    variants = VARIANTS_213M if args.model == "213m" else TINY
    variant = args.variant or next(iter(variants))
    if variant not in variants:
        parser.error(f"--variant of {args.model} is one of {', '.join(variants)}")

    def make() -> dict[str, Any]:
        engine = engine_213m(args.work, variant) if args.model == "213m" else tiny_engine(args.work, TINY[variant])
        return {"model": args.model, "variant": variant, **measure(engine, args)}

    return run_program(args, make, table)


if __name__ == "__main__":
    sys.exit(main())
