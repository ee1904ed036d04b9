"""How long TensorRT for RTX builds plans without a GPU, what memory it takes, and how large they are: random weights.

    python -m perf.engine.plans --model 213M 8B --output perf/results/tensorrt-plans

Each model has a cut in its middle and an FP8 cache. Weights, ONNX files and plans lie in a folder of
--work for as long as they are needed; 8B takes 33 GB there. Peak memory is the build process's resident set, in which
the file of the weights is mapped.
"""

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kvforge.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from kvforge.compiler.onnx_export import write_onnx
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.tensorrt_process import build_plans_apart
from model_defs import load_config
from model_defs.weights import weight_specs
from perf.harness.command import Report, add_report, add_work, begin_report, make_parser, run_program
from perf.harness.random_checkpoint import LLAMA_8B, LLAMA_213M
from perf.harness.tables import markdown_table

MODELS = {"213M": LLAMA_213M, "8B": LLAMA_8B}
OPTIONS = ResolvedOptions("tensorrt", "bfloat16", "fp8", 64, 2048, 8192, 32)


def build(name: str, folder: Path) -> dict[str, Any]:
    """Build the plans of a model; returns seconds, bytes and what built them."""
    shape, weights = MODELS[name], folder / "weights.safetensors"
    cut = shape["num_hidden_layers"] // 2
    config = load_config(
        {
            **shape,
            "model_type": f"{shape['model_type']}_swiftkv",
            "swiftkv": True,
            "num_key_value_layers": cut,
            "key_value_group_size": 1,
        }
    )
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
        "model": name,
        "weight_bytes": weights.stat().st_size,
        "plan_bytes": sum((folder / f"{graph}.plan").stat().st_size for graph in OPTIONS.graphs),
        "export_s": export_s,
        "build_s": build_s,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_bytes": after.ru_maxrss * 1024,
        "builder": f"{built['plan_builder']} {built['plan_version']}",
    }


def measure(args: argparse.Namespace) -> Report:
    """Build each model's, the smallest first: a process' children have one peak."""
    rows = []
    for name in sorted(args.model, key=[*MODELS].index):
        args.work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.work) as temporary:
            folder = Path(temporary) / "rank0"
            folder.mkdir()
            rows.append(build(name, folder))
    return begin_report("perf.engine.plans") | {"rows": rows}


def table(report: Report) -> str:
    """Return the table with its explanation."""
    head = ["model", "weights", "plans", "export s", "build s", "of it CPU", "peak memory", "over weights"]
    lines = [
        [
            row["model"],
            f"{row['weight_bytes'] / 1e9:.2f} GB",
            f"{row['plan_bytes'] / 1e9:.2f} GB",
            f"{row['export_s']:.0f}",
            f"{row['build_s']:.0f}",
            f"{row['cpu_s']:.0f}",
            f"{row['peak_bytes'] / 1e9:.2f} GB",
            f"{row['peak_bytes'] / row['weight_bytes']:.2f}",
        ]
        for row in report["rows"]
    ]
    parts = [
        "# Plans built without a GPU",
        f"`{report['command']}`, {report['machine']}.",
        "Random weights in bfloat16, a cut in the middle, FP8 cache, limits of 64 sequences and 2048 "
        "tokens; lower and upper plan. Peak memory is the build process's, with the mapped file of the weights.",
        markdown_table(head, lines),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Parse the command line, measure and report."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["213M"])
    add_work(parser, what="where weights and plans are while they are needed")
    add_report(parser, "OUTPUT.json and OUTPUT.md")
    args = parser.parse_args()
    return run_program(args, lambda: measure(args), table, markdown=True)


if __name__ == "__main__":
    sys.exit(main())
