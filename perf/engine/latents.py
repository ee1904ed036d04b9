"""Latent attention end to end: 2 of DeepSeek-V2-Lite's 27 layers, 7% of its parameters, with random weights.

    python -m perf.engine.latents --output perf/results/latents

One layer is dense and one has the experts; the cut is between them. A prompt's time is to its first token; a decode
step's is the median of several behind the prompts, beside the floor of the bytes that it reads over the rate of a plain
read (``perf.engine.floors``). Bytes of a token are those of the pools that the engine allocated.
"""

import argparse
import gc
import statistics
import sys
import time
from typing import Any

import numpy as np

from kvforge.compiler import BuildOptions
from kvforge.costs.weights import step_weight_bytes
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.sessions.pools import allocate_pools, device_bytes
from perf.engine.floors import measure_rates
from perf.harness.batch import Batch
from perf.harness.command import Report, begin_report, make_parser, run_program
from perf.harness.decoding import add_decoding
from perf.harness.engines import cached_engine
from perf.harness.random_checkpoint import DEEPSEEK_V2_LITE, cached_checkpoint
from perf.harness.tables import markdown_table

MODEL = {**DEEPSEEK_V2_LITE, "num_hidden_layers": 2}
CUTS = {"no cut": None, "cut 1": 1}


def measure_batch(engine: LLMEngine, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Serve ``batch`` prompts; return the seconds to the last one's first token and those of a decode step."""
    prompts = np.random.default_rng(batch).integers(3, MODEL["vocab_size"], (batch, args.input_tokens)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=args.output_tokens, ignore_eos=True)
    before = measure_rates(size=64)
    begin = time.perf_counter()
    running, steps = Batch(engine, prompts, params), []
    running.start()
    first_s = time.perf_counter() - begin
    while not running.num_finished:
        begin = time.perf_counter()
        running.step()
        steps.append(time.perf_counter() - begin)
    running.finish()
    manifest, read = engine.manifest, max(before.read, measure_rates(size=64).read)
    context = args.input_tokens + args.output_tokens / 2
    num_bytes = step_weight_bytes(manifest.model, manifest.weight_dtype, batch)
    num_bytes += batch * context * manifest.kv_bytes_per_token
    step_s = statistics.median(steps[1:-1])
    return {"batch": batch, "first_s": first_s, "step_s": step_s, "floor_s": num_bytes / read}


def measure(args: argparse.Namespace) -> Report:
    """Run every batch with each dtype of the weights, with a cut and without."""
    rows = []
    for weight_dtype in args.weight_dtype:
        for name, cut in CUTS.items():
            build = BuildOptions(
                dtype="bfloat16",
                weight_dtype=weight_dtype,
                max_num_seqs=max(args.batch),
                max_num_tokens=512,
                max_seq_len=args.input_tokens + args.output_tokens,
            )
            checkpoint = args.work / f"latents-{cut}"
            folder = args.work / f"latents-{cut}-{weight_dtype}-{build.max_seq_len}-{max(args.batch)}"
            engine_dir = cached_engine(folder, lambda at=checkpoint, k=cut: cached_checkpoint(at, MODEL, k), build)
            engine = LLMEngine(engine_dir, enable_prefix_cache=False)
            manifest, num_pages = engine.manifest, 8
            allocated = device_bytes(manifest, allocate_pools(manifest, num_pages))
            kept = {"token_bytes": allocated / num_pages / manifest.page_size, "owners": manifest.model.num_owners}
            for batch in args.batch:
                row = measure_batch(engine, batch, args)
                rows.append({"weights": manifest.weight_dtype, "model": name, **kept, **row})
            del engine
            gc.collect()
    return begin_report("perf.engine.latents") | {"input_tokens": args.input_tokens, "rows": rows}


def table(report: Report) -> str:
    """Return the table with its explanation."""
    head = ["weights", "model", "bytes a token and owner", "batch", "first token s", "step ms", "floor ms", "of it"]
    lines = [
        [
            row["weights"],
            row["model"],
            f"{row['token_bytes'] / row['owners']:.0f}",
            row["batch"],
            f"{row['first_s']:.2f}",
            f"{1e3 * row['step_s']:.1f}",
            f"{1e3 * row['floor_s']:.1f}",
            f"{row['floor_s'] / row['step_s']:.0%}",
        ]
        for row in report["rows"]
    ]
    parts = [
        "# Latent attention end to end",
        f"`{report['command']}`, {report['machine']}.",
        f"2 of DeepSeek-V2-Lite's 27 layers, random weights, prompts of {report['input_tokens']} tokens.",
        "The floor is the bytes of a step's weights, with the experts that so many tokens choose on average, and of "
        "its cache, over the rate of a plain read.",
        markdown_table(head, lines),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Parse the command line, measure and report."""
    parser = make_parser(__doc__)
    add_decoding(parser, input_tokens=512)
    args = parser.parse_args()
    return run_program(args, lambda: measure(args), table, markdown=True)


if __name__ == "__main__":
    sys.exit(main())
