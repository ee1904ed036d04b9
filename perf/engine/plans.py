"""How long TensorRT for RTX builds plans without a GPU, what memory it takes, and how large they are: random weights.

    python -m perf.engine.plans --model 213M 8B --output perf/results/tensorrt-plans

Each model has a cut in its middle and an FP8 cache. Weights, ONNX files and plans lie in a folder of
--work for as long as they are needed; 8B takes 33 GB there. Peak memory is the build process's resident set, in which
the file of the weights is mapped.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvforge.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from kvforge.compiler.onnx_export import write_onnx
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.tensorrt_process import build_plans_apart
from model_defs import load_config
from model_defs.weights import weight_specs
from perf.harness.experiment import Experiment, Row, option, output, ratio, work
from perf.harness.random_checkpoint import LLAMA_8B, LLAMA_213M, with_cut

MODELS = {"213M": LLAMA_213M, "8B": LLAMA_8B}
OPTIONS = ResolvedOptions("tensorrt", "bfloat16", "fp8", 64, 2048, 8192, 32)


def build(name: str, folder: Path) -> dict[str, Any]:
    """Build the plans of a model; returns seconds, bytes and what built them."""
    shape, weights = MODELS[name], folder / "weights.safetensors"
    config = load_config(with_cut(shape, shape["num_hidden_layers"] // 2))
    generator = torch.Generator().manual_seed(0)
    specs = [TensorSpec(spec.name, tuple(spec.shape), torch.bfloat16) for spec in weight_specs(config)]
    write_safetensors(
        weights, specs, lambda spec: torch.empty(spec.shape, dtype=spec.dtype).normal_(generator=generator)
    )
    begin = time.perf_counter()
    for graph in OPTIONS.graphs:
        write_onnx(graph, config, OPTIONS, folder / f"{graph}.onnx", weights)
    export_s = time.perf_counter() - begin
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    built = build_plans_apart(folder, OPTIONS, lambda stage: None)
    build_s, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "model": name, "weight_bytes": weights.stat().st_size,
        "plan_bytes": sum((folder / f"{graph}.plan").stat().st_size for graph in OPTIONS.graphs), "export_s": export_s,
        "build_s": build_s, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_bytes": after.ru_maxrss * 1024, "builder": f"{built['plan_builder']} {built['plan_version']}",
    }  # fmt: skip


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Build each model's, the smallest first: a process' children have one peak."""
    for name in sorted(args.model, key=[*MODELS].index):
        args.work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.work) as temporary:
            folder = Path(temporary) / "rank0"
            folder.mkdir()
            yield build(name, folder)


EXPERIMENT = Experiment(
    "perf.engine.plans", __doc__,
    options=(
        option("--model", nargs="+", choices=MODELS, default=["213M"]),
        work(what="where weights and plans are while they are needed"), output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=measure, title="Plans built without a GPU",
    notes="Random weights in bfloat16, a cut in the middle, FP8 cache, limits of 64 sequences and 2048 tokens; lower "
    "and upper plan. Peak memory is the build process's, with the mapped file of the weights.",
    columns=(
        ("model", "model"), ("weights", "weight_bytes", "{:.2f} GB", 1e-9), ("plans", "plan_bytes", "{:.2f} GB", 1e-9),
        ("export s", "export_s", ".0f"), ("build s", "build_s", ".0f"), ("of it CPU", "cpu_s", ".0f"),
        ("peak memory", "peak_bytes", "{:.2f} GB", 1e-9), ("over weights", ratio("peak_bytes", "weight_bytes"), ".2f"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
