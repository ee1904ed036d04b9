"""What serving costs: the same requests served (gRPC, streamed) and offline, alternating in one sitting.

    python -m perf.serving.overhead [--model 213m|tiny] [--variant "no cut"] [--entrance ensemble tensorrt_llm]
        [--stream-interval 1 0 8] [--num-runs 2] [--output FILE]

Prints the throughput of offline use and of each entrance with each number of tokens in a response, the ratios, and
where the processor time of served runs went. Offline is kvforge.LLM.generate on the same texts with the same limits;
neither side reuses prompt starts. Both sides have all requests at once, unless --concurrency says otherwise.
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
ENTRANCES = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")
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


@dataclass(frozen=True)
class Way:
    """A way to be served: a model of the server, and tokens in a response of a stream."""

    entrance: str
    stream_interval: int

    def request(self, prompt: str, token_ids: list[int], max_tokens: int) -> Any:
        if self.entrance != "tensorrt_llm":
            text = ask_text(prompt, max_tokens, end_id=-1)
            return infer_request(self.entrance, text, "text_output", stream_interval=self.stream_interval)
        inputs = {"input_ids": token_ids, "input_lengths": len(token_ids), "request_output_len": max_tokens,
                  "streaming": True, "end_id": -1}  # fmt: skip
        return infer_request(self.entrance, inputs, "output_ids", stream_interval=self.stream_interval)


def run_served(server: TritonServer, requests: list[Any], concurrency: int) -> Run:
    """``concurrency`` requests at a time over one connection."""
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
    """Alternate all ways and offline use ``num_runs`` times, after one short warm-up of each; returns the report."""
    tokenizer, vocab = tokenizer_of(engine), load_manifest(engine).vocab_size
    ways = [Way(entrance, interval) for entrance in args.entrance for interval in args.stream_interval]
    num, concurrency = args.requests, args.concurrency or args.requests

    def prompts(seed: int) -> list[str]:
        return make_prompts(tokenizer, vocab, num, args.input_tokens, seed)

    def requests(way: Way, texts: list[str], max_tokens: int) -> list[Any]:
        return [way.request(text, tokenizer.encode(text), max_tokens) for text in texts]

    offline: list[Run] = []
    served: dict[Way, list[Run]] = {way: [] for way in ways}
    options = ServerOptions(kv_cache_gib=KV_CACHE_GIB, enable_prefix_cache=False)
    with TritonServer(engine, options) as server:
        llm = LLM(engine, kv_cache_gib=KV_CACHE_GIB, enable_prefix_cache=False)
        warm = prompts(10**6)[:2]
        run_offline(llm, warm, 8)
        for way in ways:
            run_served(server, requests(way, warm, 8), 2)
        for seed in range(args.num_runs):
            texts = prompts(seed)
            gc.collect()
            offline.append(run_offline(llm, texts, args.output_tokens))
            _progress("offline", offline[-1])
            for way in ways:
                served[way].append(run_served(server, requests(way, texts, args.output_tokens), concurrency))
                _progress(f"{way.entrance}, {way.stream_interval}", served[way][-1])
    seconds = statistics.median(run.total_s for run in offline)
    return {
        **begin_report("perf.serving.overhead"),
        "requests": num,
        "concurrency": concurrency,
        "input_tokens": args.input_tokens,
        "output_tokens": args.output_tokens,
        "offline": {
            "seconds": seconds,
            "output_tok_s": num * args.output_tokens / seconds,
            "step_ms": 1e3 * statistics.median(run.total_s / run.num_steps for run in offline),
            "runs": [asdict(run) for run in offline],
        },
        "served": [_summary(way, served[way], seconds, num * args.output_tokens) for way in ways],
    }


def _summary(way: Way, runs: list[Run], offline_s: float, num_tokens: int) -> dict[str, Any]:
    seconds = statistics.median(run.total_s for run in runs)
    middle = min(runs, key=lambda run: abs(run.total_s - seconds))
    return {
        **asdict(way),
        "seconds": seconds,
        "to_offline": offline_s / seconds,
        "output_tok_s": num_tokens / seconds,
        "responses_s": middle.num_responses / middle.total_s,
        "tokens_per_response": num_tokens / middle.num_responses,
        "ttft_s": statistics.median(run.ttft_s for run in runs),
        "step_ms": 1e3 * statistics.median(run.total_s / max(1, run.num_steps) for run in runs),
        "cpu_s": {role: round(sum(threads), 2) for role, threads in (middle.cpu_s or {}).items() if sum(threads)},
        "runs": [{name: value for name, value in asdict(run).items() if name != "cpu_s"} for run in runs],
    }


def _progress(name: str, run: Run) -> None:
    print(f"  {name}: {run.total_s:.2f} s, {run.num_steps} steps", file=sys.stderr, flush=True)


def table(report: dict[str, Any]) -> str:
    """The report for a reader."""
    offline = report["offline"]
    lines = [
        f"{report['requests']} requests of {report['input_tokens']} -> {report['output_tokens']} tokens, "
        f"{report['concurrency']} at a time",
        f"{'entrance':<18} {'interval':>8} {'seconds':>8} {'tok/s out':>9} {'of offline':>10} {'responses/s':>11} "
        f"{'tokens each':>11} {'TTFT s':>7} {'ms/step':>8}",
        f"{'offline':<18} {'':>8} {offline['seconds']:>8.2f} {offline['output_tok_s']:>9.0f} {'':>10} {'':>11} "
        f"{'':>11} {'':>7} {offline['step_ms']:>8.2f}",
    ]
    lines += [
        f"{run['entrance']:<18} {run['stream_interval']:>8} {run['seconds']:>8.2f} {run['output_tok_s']:>9.0f} "
        f"{run['to_offline']:>10.3f} {run['responses_s']:>11.0f} {run['tokens_per_response']:>11.1f} "
        f"{run['ttft_s']:>7.2f} {run['step_ms']:>8.2f}"
        for run in report["served"]
    ]
    lines.append("processor seconds of a served run, by process:")
    for run in report["served"]:
        used = sorted(run["cpu_s"].items(), key=lambda item: -item[1])
        shares = ", ".join(f"{role} {seconds:.1f}" for role, seconds in used)
        lines.append(f"  {run['entrance']}, {run['stream_interval']}: {shares}")
    return "\n".join(lines)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=("213m", "tiny"), default="213m")
    parser.add_argument("--variant", help=f"213m: one of {', '.join(VARIANTS_213M)}; tiny: one of {', '.join(TINY)}")
    add_work(parser)
    parser.add_argument("--requests", type=positive, default=32)
    parser.add_argument("--concurrency", type=positive, help="requests at a time (default: all)")
    parser.add_argument("--entrance", nargs="+", choices=ENTRANCES, default=["ensemble"])
    parser.add_argument("--stream-interval", nargs="+", type=int, default=[1, 0], metavar="N")
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
