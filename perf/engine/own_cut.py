"""Time to the first token of a model with a cut of its own, beside the same model whose prompts run all layers.

    python -m perf.engine.own_cut --output perf/results/own-cut

The model has the layers of Gemma 4 E2B's text model, of which the upper 20 of 35 read lower ones' caches, random
weights, and a vocabulary of --vocab-size: of its tables a token looks up one row. Two engines of the same checkpoint
take turns, one request at a time, and their tokens are compared. The floor is the FLOPs of the linear layers and of
attention over what this machine's own products reach.
"""

import argparse
import gc
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from kvforge.checkpoint import model as checkpoint_model
from kvforge.common.number_formats import QUANTIZED_WEIGHT_BYTES
from kvforge.compiler import BuildOptions
from kvforge.compiler.options import PACKED_DTYPES
from kvforge.costs.flops import prompt_flops
from kvforge.runtime.engine import LLMEngine
from model_defs import ModelConfig, load_config
from perf.engine.floors import best_rates, measure_rates
from perf.harness.batch import Batch
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Report, lengths, number, option, output, work
from perf.harness.random_checkpoint import GEMMA4_E2B, cached_checkpoint
from perf.harness.tables import spread

SKIPPING, ALL_LAYERS = "its own cut", "all layers for all tokens"


def without_cut(config: ModelConfig) -> ModelConfig:
    """Return the model with the same layers, weights and caches, whose prompts do not stop at the cut."""
    return replace(config, cut=config.num_layers)


@contextmanager
def read_without_cut() -> Iterator[None]:
    """Checkpoints that are read meanwhile have no cut."""

    def read(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        return without_cut(load_config(hf, generation))

    with mock.patch.object(checkpoint_model, "load_config", read):
        yield


def engines_of(hf: Mapping[str, Any], work: Path, options: BuildOptions) -> dict[str, Path]:
    """Return both engines of the model that ``hf`` describes, built where they are not there yet."""
    name = f"{options.weight_dtype}-{options.max_seq_len}-{hf['vocab_size']}"

    def checkpoint() -> Path:
        return cached_checkpoint(work / f"checkpoint-{hf['vocab_size']}", hf)

    engines = {SKIPPING: cached_engine(work / f"own-{name}", checkpoint, options)}
    with read_without_cut():
        engines[ALL_LAYERS] = cached_engine(work / f"all-{name}", checkpoint, options)
    return engines


def serve(engine: LLMEngine, prompt: list[int], output_tokens: int) -> tuple[float, list[int]]:
    """Serve one request; return the seconds to its first token, and its tokens."""
    running = Batch(engine, [prompt], output_tokens)
    seconds = running.start()
    running.finish()
    return seconds, running.tokens[0]


def measure(args: argparse.Namespace) -> Report:
    """Serve one prompt after the other in both engines."""
    hf = {**GEMMA4_E2B, "vocab_size": args.vocab_size, "vocab_size_per_layer_input": args.vocab_size}
    limits = {"max_num_seqs": 4, "max_num_tokens": 2048, "max_seq_len": args.input_tokens + args.output_tokens}
    folders = engines_of(hf, args.work, BuildOptions(dtype="bfloat16", weight_dtype=args.weight_dtype, **limits))
    engines = {name: LLMEngine(at, enable_prefix_cache=False, kv_cache_gib=0.5) for name, at in folders.items()}
    gc.collect()
    prompts = np.random.default_rng(0).integers(3, args.vocab_size, (args.rounds + 1, args.input_tokens)).tolist()
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    num_equal, before = 0, measure_rates()
    for index, prompt in enumerate(prompts):
        found = {name: serve(engine, prompt, args.output_tokens) for name, engine in engines.items()}
        if index == 0:  # the first touches every page of the weights
            continue
        num_equal += found[SKIPPING][1] == found[ALL_LAYERS][1]
        for name, (first, _) in found.items():
            seconds[name].append(first)
    best = best_rates(before, measure_rates())
    config = load_config(hf)
    flops = {SKIPPING: config, ALL_LAYERS: without_cut(config)}
    return {
        "equal_texts": num_equal,
        "ratio": statistics.median(a / b for a, b in zip(seconds[SKIPPING], seconds[ALL_LAYERS], strict=True)),
        "flops_per_s": best.int8_gemm if args.weight_dtype in QUANTIZED_WEIGHT_BYTES else best.bf16_gemm,
        "rows": [
            {"engine": name, "ttft_s": found, "flops": prompt_flops(flops[name], args.input_tokens)}
            for name, found in seconds.items()
        ],
    }


def notes(report: Report) -> str:
    """What was compared, and what came out."""
    count = len(report["rows"][0]["ttft_s"])
    return (
        f"Layers of Gemma 4 E2B, random weights in {report['weight_dtype']}, a vocabulary of {report['vocab_size']}, "
        f"prompts of {report['input_tokens']} tokens, {count} in turns. The median ratio is **{report['ratio']:.2f}**; "
        f"{report['equal_texts']} of {count} texts are equal."
    )


EXPERIMENT = Experiment(
    "perf.engine.own_cut", __doc__,
    options=(
        work(), option("--weight-dtype", default="int8", choices=["bfloat16", *PACKED_DTYPES]),
        number("--vocab-size", 32768, "of 262144 (default %(default)s)"), lengths(2048, 8), number("--rounds", 3),
        output("OUTPUT.json and .md"),
    ),
    measure=measure, settings=("input_tokens", "weight_dtype", "vocab_size"), title="A model with a cut of its own",
    notes=notes,
    columns=lambda report: (
        ("prompts run", "engine"), ("time to first token, s", lambda row: spread(row["ttft_s"], 2)),
        ("TFLOP", "flops", ".2f", 1e-12), ("floor, s", "flops", ".2f", 1 / report["flops_per_s"]),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
