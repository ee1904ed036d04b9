"""Decode steps of a mixture of experts: an eighth of Qwen3-30B-A3B, 6 of its 48 layers, with random weights.

    python -m perf.engine.experts --output perf/results/experts

The floor of a step is the bytes that it reads over the rate of a plain read, measured before and after, of which the
better counts: the experts that the step's tokens go to, each once, all other linear layers, the head and the cache.
Which experts these are is counted: the tokens that came out go through the same graph once more.
"""

import argparse
import gc
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvforge.compiler import BuildOptions
from kvforge.compiler.cpu_graph import pack_linears
from kvforge.compiler.options import PACKED_DTYPES
from kvforge.costs.cache import kv_read_bytes
from kvforge.costs.weights import step_weight_bytes
from kvforge.manifest import WEIGHTS_FILE
from kvforge.runtime.engine import LLMEngine
from model_defs import ModelConfig, layers, load_config
from model_defs.graphs import LowerGraph
from perf.engine.floors import measure_rates
from perf.harness.batch import Batch
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Row, ratio
from perf.harness.options import decoding
from perf.harness.random_checkpoint import QWEN3_30B_A3B, cached_checkpoint
from plugins.route_experts import route_experts

MODEL = {**QWEN3_30B_A3B, "num_hidden_layers": 6}
MAX_SEQ_LEN = 1024


class Counter:
    """The experts of each token of a sequence, from the graph that the engine was compiled from."""

    def __init__(self, engine: Path, config: ModelConfig, weight_dtype: str) -> None:
        with torch.device("meta"):
            self.graph = LowerGraph(config)
        pack_linears(self.graph, PACKED_DTYPES.get(weight_dtype, torch.bfloat16))
        weights = load_file(engine / WEIGHTS_FILE)
        self.graph.load_state_dict({name: weights[name] for name in self.graph.state_dict()}, assign=True)
        self.config = config

    @torch.inference_mode()
    def __call__(self, tokens: list[int]) -> Tensor:
        """Return expert ids ``[tokens, layers, k]``."""
        found: list[Tensor] = []

        def note(*args: Any) -> tuple[Tensor, Tensor]:
            found.append((result := route_experts(*args))[0])
            return result

        count, config = len(tokens), self.config
        shape = (1, count, config.num_kv_heads, config.head_dim)
        pools = [(torch.zeros(shape).bfloat16(), torch.zeros(shape).bfloat16()) for _ in config.owners]
        rows, length = torch.arange(count).int(), torch.tensor([count]).int()
        starts, table = torch.tensor([0, count]).int(), torch.zeros(1, 1).int()
        with mock.patch.object(layers, "route_experts", note):
            self.graph(torch.tensor(tokens).int(), rows, rows, starts, length, table, pools)
        return torch.stack(found, dim=1)


def measure_batch(engine: LLMEngine, batch: int, args: argparse.Namespace) -> tuple[dict[str, Any], list[list[int]]]:
    """Serve ``batch`` prompts; return the seconds of a decode step, in the middle of several, and the sequences."""
    prompts = np.random.default_rng(batch).integers(3, MODEL["vocab_size"], (batch, args.input_tokens)).tolist()
    before, running = measure_rates(), Batch(engine, prompts, args.output_tokens)
    running.start()
    steps = running.steps()
    running.finish()
    read = max(before.read, measure_rates().read)
    row = {"batch": batch, "step_s": statistics.median(steps[1:-1]), "read_bytes_per_s": read}
    return row, [prompt + tokens for prompt, tokens in zip(prompts, running.tokens, strict=True)]


def distinct_experts(counter: Counter, sequences: list[list[int]], first: int) -> float:
    """Return the mean number of experts of a layer that a step of all sequences goes to, from position ``first`` on."""
    ids = torch.stack([counter(tokens)[first:-1] for tokens in sequences], dim=2).flatten(2)
    return float(np.mean([len(of_layer.unique()) for step in ids for of_layer in step]))


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Run every batch with each dtype of the weights."""
    config, middle = load_config(MODEL), args.input_tokens + args.output_tokens / 2
    for weight_dtype in args.weight_dtype:
        limits = {"max_num_seqs": max(args.batch), "max_num_tokens": 512, "max_seq_len": MAX_SEQ_LEN}
        build = BuildOptions(dtype="bfloat16", weight_dtype=weight_dtype, **limits)
        folder = args.work / f"experts-{weight_dtype}-{max(args.batch)}"
        folder = cached_engine(folder, lambda: cached_checkpoint(args.work / "experts-checkpoint", MODEL), build)
        engine = LLMEngine(folder, enable_prefix_cache=False)
        manifest = engine.manifest
        measured = [measure_batch(engine, batch, args) for batch in args.batch]
        del engine
        gc.collect()
        counter = Counter(folder, config, weight_dtype)
        for row, sequences in measured:
            experts = distinct_experts(counter, sequences, args.input_tokens)
            dense, whole = (step_weight_bytes(manifest.model, manifest.weight_dtype, tokens) for tokens in (0, None))
            num_bytes = dense + (whole - dense) * experts / MODEL["num_experts"]
            num_bytes += row["batch"] * kv_read_bytes(manifest.model, manifest.kv_dtype, middle)
            floor = num_bytes / row["read_bytes_per_s"]
            yield {"weight_dtype": manifest.weight_dtype, **row, "experts": experts, "floor_s": floor}


EXPERIMENT = Experiment(
    "perf.engine.experts", __doc__, options=(decoding(input_tokens=32),), measure=measure, settings=("input_tokens",),
    title="Decode steps of a mixture of experts",
    notes="6 layers of Qwen3-30B-A3B's shape, random weights, after prompts of {input_tokens} tokens. The floor is "
    "the bytes of the experts that a step's tokens go to, of all other weights and of the cache, over the rate of a "
    "plain read.",
    columns=(
        ("weights", "weight_dtype"), ("batch", "batch"),
        ("experts a layer", "experts", f"{{:.1f}} of {MODEL['num_experts']}"), ("step ms", "step_s", ".2f", 1e3),
        ("floor ms", "floor_s", ".2f", 1e3), ("share of the floor", ratio("floor_s", "step_s"), ".0%"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
