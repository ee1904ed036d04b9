"""Times the operators' Triton kernels on the GPU beside torch's attention, FlashAttention 3 and the machine's floors.

    PYTHONPATH=. python -m perf.gpu.operators --json perf/results/operators-h200.json

Attention's shapes are Llama-3.1-8B's (32 heads, 8 KV heads, head dim 128). A floor is the FLOPs of the causal half over
the rate of a large bf16 matrix product, or the bytes that must move over the rate of a large copy (read + written),
whichever is longer. torch's two backends read contiguous, unpaged bf16 tensors; FlashAttention 3, where it can be
imported, the same pages as the kernels. `--device cpu --tiny` times the C++ kernels the same way, on small shapes.
"""

import argparse
from typing import Any

import torch

import plugins
from perf.gpu.attention import DTYPES, HEAD_DIM, KV_HEADS, PAGE_SIZE, Case, Tensors, cache, others_seconds, ours
from perf.gpu.machine import Kept, gpu_parser, machine_rates, parse_checked
from perf.gpu.timing import best_seconds
from perf.harness.command import run_main
from perf.harness.options import option
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
        "case": case, "kvforge_s": seconds, "floor_s": floor, "share_of_floor": floor / seconds,
        "tflops": flops / seconds / 1e12, "gb_per_s": num_bytes / seconds / 1e9,
    }  # fmt: skip


COLUMNS = (
    ("case", "case", "<24"), ("ms", "kvforge_s", ">10.3f", 1e3), ("floor ms", "floor_s", ">10.3f", 1e3),
    ("share", "share_of_floor", ">7.2f"), ("TFLOP/s", "tflops", ">9.1f"), ("GB/s", "gb_per_s", ">9.1f"),
    *((f"{name} ms", f"{name}_s", ">10.3f", 1e3) for name in ("cudnn", "flash", "fa3")),
)  # fmt: skip


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    formats = option("--formats", nargs="+", choices=DTYPES, default=["bf16", "fp8"], metavar="FORMAT")
    return parse_checked(gpu_parser(__doc__, "operators", "contexts", formats, has_work=False), arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and write the report after each row."""
    options = parse_arguments(arguments)
    device, tiny = options.device, options.tiny
    torch.manual_seed(0)
    if device == "cuda":
        cuda_ops.register()
    else:
        plugins.load_library()
    rates = machine_rates(device)
    kept = Kept("perf.gpu.operators", arguments, options, COLUMNS, rates=rates)
    for name in options.formats:
        cases = [Case(sequences, length, length, name) for sequences, length in (TINY_PREFILLS if tiny else PREFILLS)]
        cases += [Case(sequences, 1, length, name) for sequences, length in (TINY_DECODES if tiny else DECODES)]
        for case in cases:
            kept.add(attention_row(case, device, rates))
            for other, why in kept.rows[-1]["without"].items():
                print(f"  {other}: {why}", flush=True)
        for tokens in TINY_WRITES if tiny else WRITES:
            kept.add(write_row(tokens, name, device, rates))
    print("\n" + kept.table())


if __name__ == "__main__":
    raise SystemExit(run_main(main))
