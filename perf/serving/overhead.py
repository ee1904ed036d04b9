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
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.manifest import load_manifest
from kvforge.runtime.llm import LLM
from kvforge.runtime.requests.params import SamplingParams
from kvforge.serving.health.probe import read_metrics
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from perf.harness.engines import tokenizer_of
from perf.harness.experiment import Experiment, lengths, number, option, output, work
from perf.harness.tables import text_table
from perf.serving.load.client import ask_all, ask_text, ask_tokens, infer_request
from perf.serving.load.engines import TINY, VARIANTS_213M, engine_213m, tiny_engine
from perf.serving.load.processes import CpuWindow
from perf.serving.load.prompts import make_prompts

KV_CACHE_GIB = 1.0
VARIANTS: dict[str, Any] = {"213m": VARIANTS_213M, "tiny": TINY}
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
    least = min(len(output.outputs[0].token_ids) for output in outputs)
    if least != max_tokens:
        raise KvforgeError(f"an answer has {least} tokens where {max_tokens} were forced")
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
        inputs = ask_tokens(token_ids, max_tokens, end_id=-1)
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


def variant_of(args: argparse.Namespace) -> str:
    """Return the variant asked for, by default the model's first."""
    return args.variant or next(iter(VARIANTS[args.model]))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Alternate all ways and offline use ``num_runs`` times, after one short warm-up of each; returns the report."""
    variant = variant_of(args)
    engine = engine_213m(args.work, variant) if args.model == "213m" else tiny_engine(args.work, TINY[variant])
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
        "model": args.model,
        "variant": variant_of(args),
        "concurrency": concurrency,
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


COLUMNS = (
    ("entrance", "entrance", "<18"), ("interval", "stream_interval", ">8"), ("seconds", "seconds", ">8.2f"),
    ("tok/s out", "output_tok_s", ">9.0f"), ("of offline", "to_offline", ">10.3f"),
    ("responses/s", "responses_s", ">11.0f"), ("tokens each", "tokens_per_response", ">11.1f"),
    ("TTFT s", "ttft_s", ">7.2f"), ("ms/step", "step_ms", ">8.2f"),
)  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """The report for a reader."""
    lines = [
        "{requests} requests of {input_tokens} -> {output_tokens} tokens, {concurrency} at a time".format_map(report),
        text_table(COLUMNS, [{"entrance": "offline", **report["offline"]}, *report["served"]]),
        "processor seconds of a served run, by process:",
    ]
    for run in report["served"]:
        used = sorted(run["cpu_s"].items(), key=lambda item: -item[1])
        shares = ", ".join(f"{role} {seconds:.1f}" for role, seconds in used)
        lines.append(f"  {run['entrance']}, {run['stream_interval']}: {shares}")
    return "\n".join(lines)


def check(args: argparse.Namespace) -> str | None:
    """Say what cannot be asked for."""
    variants = VARIANTS[args.model]
    return None if variant_of(args) in variants else f"--variant of {args.model} is one of {', '.join(variants)}"


EXPERIMENT = Experiment(
    "perf.serving.overhead", __doc__,
    options=(
        option("--model", choices=("213m", "tiny"), default="213m"),
        option("--variant", help=f"213m: one of {', '.join(VARIANTS_213M)}; tiny: one of {', '.join(TINY)}"), work(),
        number("--requests", 32), number("--concurrency", None, "requests at a time (default: all)"),
        option("--entrance", nargs="+", choices=ENTRANCES, default=["ensemble"]),
        option("--stream-interval", nargs="+", type=int, default=[1, 0], metavar="N"), lengths(1024, 64),
        number("--num-runs", 2, "of which medians are reported (default 2)"), output("OUTPUT.json"),
    ),
    measure=measure, settings=("requests", "input_tokens", "output_tokens"), check=check, shown=table, is_plain=True,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
