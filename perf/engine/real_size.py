"""A model of real size: Llama-3.1-8B's shape, random weights, a cut and AcrossKV, int8 weights, an fp8 cache.

    python -m perf.engine.real_size [--work DIR] [--output perf/results/real-size]

The checkpoint (15 GB) and the engine (8 GB) are written to --work and kept. Building is a process, and so are loading
and generating; their peaks of resident memory are measured. Then the engine is served and asked over gRPC. A decode
step's floor is its weights' and cache's bytes at the rate of a plain read.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvforge.common.errors import KvforgeError
from perf.harness.engines import ROOT
from perf.harness.experiment import Experiment, output, place, told, work
from perf.harness.random_checkpoint import LLAMA_8B, cached_checkpoint
from perf.harness.tables import markdown_table

SPECIAL = {"max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2}
CUT, GROUP_SIZE = 16, 4
KV_CACHE_GIB = 1.0
PROMPT, OUTPUT, BATCHES = 512, 24, (1, 8)


def run_apart(command: list[str]) -> tuple[str, float, float]:
    """Run a command; returns its output, seconds, and the peak of its resident memory in GB."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise KvforgeError(f"{' '.join(command[:4])} ... failed; see above.")
    return output, time.perf_counter() - start, used.ru_maxrss * 1024 / 1e9


def generate(engine_dir: Path) -> dict[str, Any]:
    """Load and generate, in this process."""
    from kvforge.runtime.engine import LLMEngine
    from perf.engine.floors import decode_work, measure_rates, prefill_work
    from perf.engine.phases import run_phases

    start = time.perf_counter()
    engine = LLMEngine(str(engine_dir), enable_prefix_cache=False, kv_cache_gib=KV_CACHE_GIB)
    load_s = time.perf_counter() - start
    loaded_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    runs = []
    for batch in BATCHES:
        prompts = np.random.default_rng(batch).integers(3, LLAMA_8B["vocab_size"], (batch, PROMPT))
        times, _ = run_phases(engine, prompts, OUTPUT)
        rates = measure_rates()
        decode_floor = decode_work(engine.manifest, times).floor_s(rates)
        run: dict[str, Any] = {"batch": batch, "ttft_s": times.ttft_s, "prefill_s": times.prefill_s}
        run["prefill_share"] = prefill_work(engine.manifest, batch, PROMPT, times).floor_s(rates) / times.prefill_s
        run |= {"decode_step_s": times.decode_s / times.decode_steps, "decode_share": decode_floor / times.decode_s}
        run |= {"decode_tok_s": batch * times.decode_steps / times.decode_s, "rates": asdict(rates)}
        runs.append(run)
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "load_s": load_s,
        "loaded_peak_gb": loaded_gb,
        "resident_gb": int(resident.split()[1]) * 1024 / 1e9,
        "runs": runs,
    }


def serve(engine_dir: Path) -> dict[str, float]:
    """Serve the engine and ask it eight times at once."""
    from kvforge.serving.server.launcher import ServerOptions, TritonServer
    from perf.serving.load.client import ask_all, ask_tokens, infer_request

    start = time.perf_counter()
    with TritonServer(engine_dir, ServerOptions(kv_cache_gib=KV_CACHE_GIB, enable_prefix_cache=False)) as server:
        ready_s = time.perf_counter() - start
        prompts = np.random.default_rng(9).integers(3, LLAMA_8B["vocab_size"], (8, PROMPT)).tolist()
        asked = [ask_tokens(prompt, OUTPUT, end_id=-1, streaming=True) for prompt in prompts]
        answers, seconds = asyncio.run(
            ask_all(server.grpc_url, [infer_request("tensorrt_llm", a, "output_ids") for a in asked], 8)
        )
    if any(len(answer.token_ids) != OUTPUT for answer in answers):
        raise KvforgeError(f"an answer is short: {[answer.code for answer in answers]}")
    return {"ready_s": ready_s, "total_s": seconds, "combined_tok_s": 8 * (PROMPT + OUTPUT) / seconds}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, one after the other."""
    checkpoint = cached_checkpoint(args.work / "llama-8b", {**LLAMA_8B, **SPECIAL}, CUT, GROUP_SIZE)
    engine = args.work / "engine-llama-8b"
    build = [sys.executable, "-m", "kvforge", "build", str(checkpoint), "-o", str(engine), "--force"]
    build += ["--weight-dtype", "int8", "--kv-dtype", "fp8", "--max-seq-len", "4096"]
    _, build_s, build_gb = run_apart(build)
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) / 1e9
    report = {"checkpoint_gb": size, "build_s": build_s, "build_peak_gb": build_gb}
    output, _, peak = run_apart([sys.executable, "-m", "perf.engine.real_size", "--generate", str(engine)])
    return report | json.loads(output.splitlines()[-1]) | {"generate_peak_gb": peak, "served": serve(engine)}


def lines(report: dict[str, Any]) -> Iterator[list[str]]:
    """Yield what was measured, and what came out."""
    yield ["checkpoint, bf16", f"{report['checkpoint_gb']:.1f} GB"]
    yield ["build", f"{report['build_s']:.0f} s, peak {report['build_peak_gb']:.1f} GB"]
    yield ["load", f"{report['load_s']:.1f} s, peak {report['loaded_peak_gb']:.1f} GB"]
    yield ["generate", f"peak {report['generate_peak_gb']:.1f} GB, resident {report['resident_gb']:.1f} GB"]
    for run in report["runs"]:
        first = f"first token {run['ttft_s']:.2f} s, prefill at {run['prefill_share']:.0%} of the floor"
        yield [f"batch {run['batch']}: {PROMPT} tokens in", first]
        step = f"{1e3 * run['decode_step_s']:.0f} ms a step, {run['decode_tok_s']:.1f} tokens/s"
        yield [f"batch {run['batch']}: decode", f"{step}, {run['decode_share']:.0%} of the floor"]
    served = report["served"]
    yield ["served", f"ready in {served['ready_s']:.0f} s; 8 at once {served['combined_tok_s']:.0f} tokens/s"]


def table(report: dict[str, Any]) -> str:
    """The report for a reader."""
    name = f"Llama-3.1-8B's shape, cut {CUT}, {GROUP_SIZE}-way, int8 weights, fp8 cache"
    return f"# {name}\n\n{told(report)}\n\n" + markdown_table(["", "measured"], lines(report))


def generate_only(args: argparse.Namespace) -> bool:
    """Load and generate where nothing else is asked for."""
    if args.generate is not None:
        print(json.dumps(generate(args.generate)))
    return args.generate is not None


EXPERIMENT = Experiment(
    "perf.engine.real_size", __doc__,
    options=(
        work(), place("--generate", "load and generate alone, as JSON", metavar="ENGINE"),
        output("OUTPUT.json and .md"),
    ),
    measure=measure, shown=table, instead=generate_only,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
