"""Times the operators' Triton kernels on the GPU beside torch's attention, FlashAttention 3 and the machine's floors.

    PYTHONPATH=. python -m perf.gpu.operators --json perf/results/operators-h200.json

Attention's shapes are Llama-3.1-8B's (32 heads, 8 KV heads, head dim 128). A floor is the FLOPs of the causal half over
the rate of a large bf16 matrix product, or the bytes that must move over the rate of a large copy (read + written),
whichever is longer. torch's two backends read contiguous, unpaged bf16 tensors; FlashAttention 3, where it can be
imported, the same pages as the kernels. `--device cpu --tiny` times the C++ kernels the same way, on small shapes.
"""

import argparse
import sys
from typing import Any

import torch

import plugins
from perf.gpu.attention import DTYPES, HEAD_DIM, KV_HEADS, PAGE_SIZE, Case, Tensors, cache, others_seconds, ours
from perf.gpu.machine import begin_gpu_report, device_name, gpu_parser, machine_rates, parse_checked
from perf.gpu.timing import best_seconds
from perf.harness.command import run_main
from perf.harness.files import write_json
from perf.harness.tables import Column, text_table
from plugins import cuda_ops
from plugins.kv_quantization import LARGEST

PREFILLS = ((1, 2048), (1, 8192), (1, 32768), (8, 2048))
DECODES = tuple((batch, length) for length in (8192, 32768) for batch in (1, 8, 32, 64))
TINY_PREFILLS, TINY_DECODES = ((1, 64),), ((2, 128),)
WRITES, TINY_WRITES = (64, 8192), (64,)


def attention_row(case: Case, device: str, rates: dict[str, float]) -> dict[str, Any]:
    """Return a case's row."""
    tensors = Tensors.of(case, device)
    seconds = best_seconds(ours(tensors), device)
    others, why = others_seconds(tensors, device)
    return {
        **row(case.name, seconds, case.flops, case.num_bytes, rates),
        **{f"{name}_s": value for name, value in others.items()},
        "without": why,
    }


def write_row(tokens: int, dtype_name: str, device: str, rates: dict[str, float]) -> dict[str, Any]:
    """Return the row of K and V of ``tokens``, rotated and written."""
    dtype = DTYPES[dtype_name]
    pools = cache(tokens // PAGE_SIZE + 1, dtype, device)
    k, v = (torch.randn(tokens, KV_HEADS, HEAD_DIM, device=device).bfloat16() for _ in range(2))
    angle = torch.rand(tokens, HEAD_DIM // 2, device=device)
    arguments = (k, v, angle.cos(), angle.sin(), torch.randperm(tokens, device=device).int(), *pools)
    seconds = best_seconds(lambda: plugins.rope_paged_kv_write(*arguments), device)
    per_head = HEAD_DIM * (2 + dtype.itemsize) + (4 if dtype in LARGEST else 0)
    return row(f"write {tokens} {dtype_name}", seconds, 0.0, tokens * (2 * KV_HEADS * per_head + HEAD_DIM * 4), rates)


def row(case: str, seconds: float, flops: float, num_bytes: float, rates: dict[str, float]) -> dict[str, Any]:
    """Return a row with its floor and the share of it that was reached."""
    floor = max(flops / rates["bf16_gemm_flops_per_s"], num_bytes / rates["copy_bytes_per_s"])
    return {
        "case": case,
        "kvforge_s": seconds,
        "floor_s": floor,
        "share_of_floor": floor / seconds,
        "tflops": flops / seconds / 1e12,
        "gb_per_s": num_bytes / seconds / 1e9,
    }


COLUMNS = (
    Column("case", "case", "<24"),
    Column("ms", "kvforge_s", ">10.3f", 1e3),
    Column("floor ms", "floor_s", ">10.3f", 1e3),
    Column("share", "share_of_floor", ">7.2f"),
    Column("TFLOP/s", "tflops", ">9.1f"),
    Column("GB/s", "gb_per_s", ">9.1f"),
    *(Column(f"{name} ms", f"{name}_s", ">10.3f", 1e3) for name in ("cudnn", "flash", "fa3")),
)


def table(rows: list[dict[str, Any]], header: bool = True) -> str:
    """Return the rows as text."""
    return text_table(COLUMNS, rows, header)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = gpu_parser(__doc__, "operators", "contexts", work=False)
    parser.add_argument("--formats", nargs="+", choices=DTYPES, default=["bf16", "fp8"], metavar="FORMAT")
    return parse_checked(parser, arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and write the report after each row."""
    options = parse_arguments(arguments)
    device, tiny = options.device, options.tiny
    torch.manual_seed(0)
    if device == "cuda":
        cuda_ops.register()
    else:
        plugins.load_library()
    report = {
        **begin_gpu_report("perf.gpu.operators", arguments),
        "machine": f"{device_name(device)}, torch {torch.__version__}",
        "rates": machine_rates(device),
    }
    rows: list[dict[str, Any]] = []
    print(table([]), flush=True)

    def add(found: dict[str, Any]) -> None:
        rows.append(found)
        print(table(rows[-1:], header=False), flush=True)
        for name, why in found.get("without", {}).items():
            print(f"  {name}: {why}", flush=True)
        if options.json:
            write_json(options.json, {**report, "rows": rows})

    for name in options.formats:
        for sequences, length in TINY_PREFILLS if tiny else PREFILLS:
            add(attention_row(Case(sequences, length, length, name), device, report["rates"]))
        for sequences, length in TINY_DECODES if tiny else DECODES:
            add(attention_row(Case(sequences, 1, length, name), device, report["rates"]))
        for tokens in TINY_WRITES if tiny else WRITES:
            add(write_row(tokens, name, device, report["rates"]))
    print("\n" + table(rows))


if __name__ == "__main__":
    sys.exit(run_main(main))
