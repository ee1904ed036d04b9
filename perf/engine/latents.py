"""Latent attention end to end: 2 of DeepSeek-V2-Lite's 27 layers, 7% of its parameters, with random weights.

    python -m perf.engine.latents --output perf/results/latents

One layer is dense and one has the experts; the cut is between them. A prompt's time is to its first token; a decode
step's is the median of several behind the prompts, beside the floor of the bytes that it reads over the rate of a plain
read (``perf.engine.floors``). Bytes of a token are those of the pools that the engine allocated.
"""

import argparse
import gc
import statistics
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from kvforge.compiler import BuildOptions
from kvforge.costs.weights import step_weight_bytes
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.sessions.pools import allocate_pools, device_bytes
from perf.engine.floors import measure_rates
from perf.harness.batch import Batch
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Row, ratio
from perf.harness.options import decoding
from perf.harness.random_checkpoint import DEEPSEEK_V2_LITE, cached_checkpoint

MODEL = {**DEEPSEEK_V2_LITE, "num_hidden_layers": 2}
CUTS = {"no cut": None, "cut 1": 1}


def measure_batch(engine: LLMEngine, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Serve ``batch`` prompts; return the seconds to the last one's first token and those of a decode step."""
    prompts = np.random.default_rng(batch).integers(3, MODEL["vocab_size"], (batch, args.input_tokens)).tolist()
    before, running = measure_rates(size=64), Batch(engine, prompts, args.output_tokens)
    first_s, steps = running.start(), running.steps()
    running.finish()
    manifest, read = engine.manifest, max(before.read, measure_rates(size=64).read)
    context = args.input_tokens + args.output_tokens / 2
    num_bytes = step_weight_bytes(manifest.model, manifest.weight_dtype, batch)
    num_bytes += batch * context * manifest.kv_bytes_per_token
    return {"batch": batch, "first_s": first_s, "step_s": statistics.median(steps[1:-1]), "floor_s": num_bytes / read}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Run every batch with each dtype of the weights, with a cut and without."""
    length = args.input_tokens + args.output_tokens
    for weight_dtype, (name, cut) in product(args.weight_dtype, CUTS.items()):
        limits = {"max_num_seqs": max(args.batch), "max_num_tokens": 512, "max_seq_len": length}
        build = BuildOptions(dtype="bfloat16", weight_dtype=weight_dtype, **limits)
        checkpoint = args.work / f"latents-{cut}"
        folder = args.work / f"latents-{cut}-{weight_dtype}-{length}-{max(args.batch)}"
        engine_dir = cached_engine(folder, lambda at=checkpoint, k=cut: cached_checkpoint(at, MODEL, k), build)
        engine = LLMEngine(engine_dir, enable_prefix_cache=False)
        manifest, num_pages = engine.manifest, 8
        allocated = device_bytes(manifest, allocate_pools(manifest, num_pages))
        kept = {"token_bytes": allocated / num_pages / manifest.page_size, "owners": manifest.model.num_owners}
        for batch in args.batch:
            yield {"weights": manifest.weight_dtype, "model": name, **kept, **measure_batch(engine, batch, args)}
        del engine
        gc.collect()


EXPERIMENT = Experiment(
    "perf.engine.latents", __doc__, options=(decoding(input_tokens=512),), measure=measure, settings=("input_tokens",),
    title="Latent attention end to end",
    notes="2 of DeepSeek-V2-Lite's 27 layers, random weights, prompts of {input_tokens} tokens. The floor is the "
    "bytes of a step's weights, with the experts that so many tokens choose on average, and of its cache, over the "
    "rate of a plain read.",
    columns=(
        ("weights", "weights"), ("model", "model"), ("bytes a token and owner", ratio("token_bytes", "owners"), ".0f"),
        ("batch", "batch"), ("first token s", "first_s", ".2f"), ("step ms", "step_s", ".1f", 1e3),
        ("floor ms", "floor_s", ".1f", 1e3), ("of it", ratio("floor_s", "step_s"), ".0%"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
