"""Times the operators' Triton kernels on the GPU beside torch's attention and the machine's floors.

    PYTHONPATH=. python -m perf.gpu.operators --json perf/results/operators-h200.json

Attention's shapes are Llama-3.1-8B's (32 heads, 8 KV heads, head dim 128). Prefill is judged by TFLOP/s of the causal
half against a large bf16 matrix product, decode and the cache write by GB/s against a large copy (read + written).
`sdpa_ms` is torch's fused attention on contiguous, unpaged bf16 tensors; the 8-bit rows have none.
`--device cpu` times the C++ kernels the same way, on small shapes.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import plugins
from perf.harness.command import make_parser
from plugins import cuda_ops
from plugins.kv_quantization import LARGEST, dynamic_scale, quantize

PAGE_SIZE = 64
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
COLUMNS = ("case", "kvforge_ms", "sdpa_ms", "tflops", "gb_per_s", "share_of_peak")


def best_seconds(work: Callable[[], Any], device: str, runs: int = 20) -> float:
    """Return the shortest of ``runs`` after three warm-ups. On a GPU the work runs as a CUDA graph, as it does in a
    decode step (starting it from Python takes longer than a small case), timed by events, the L2 cache flushed before.
    """
    for _ in range(3):
        work()
    if device == "cpu":
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for start_event, end_event in pairs:
        flush.zero_()
        start_event.record()
        graph.replay()
        end_event.record()
    torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in pairs) / 1e3


def peaks(device: str) -> dict[str, float]:
    """Return TFLOP/s of a large bf16 product and GB/s of a large copy."""
    size, num_bytes = (8192, 2 << 30) if device == "cuda" else (512, 64 << 20)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "tflops": 2 * size**3 / best_seconds(lambda: torch.mm(a, b), device) / 1e12,
        "gb_per_s": 2 * num_bytes / best_seconds(lambda: target.copy_(source), device) / 1e9,
    }


def cache(pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return random pools, with dynamic scales where ``dtype`` has 8 bits."""
    pools, scales = [], []
    for _ in range(2):
        values = torch.randn(pages, PAGE_SIZE, kv_heads, head_dim, device=device)
        if dtype in LARGEST:
            scales.append(dynamic_scale(values, dtype))
            values = quantize(values, scales[-1][..., None], dtype)
        pools.append(values.to(dtype))
    return [*pools, *scales]


def attention_flops(queries: int, length: int, heads: int, head_dim: int) -> float:
    """Return the FLOPs of the causal attention of the last ``queries`` of ``length`` positions."""
    return 4 * heads * head_dim * queries * (length - (queries - 1) / 2)


def attention_bytes(queries: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes that one sequence's attention must move: its K and V with their scales, q and the result."""
    per_head = head_dim * dtype.itemsize + (4 if dtype in LARGEST else 0)
    return 2 * length * kv_heads * per_head + 2 * queries * heads * head_dim * 2


def bench_attention(
    sequences: int,
    queries: int,
    length: int,
    dtype_name: str,
    device: str,
    peak: dict[str, float],
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
) -> dict[str, Any]:
    """Return one row: ``queries`` of each sequence of ``length`` positions, pages permuted."""
    dtype, width = DTYPES[dtype_name], -(-length // PAGE_SIZE)
    pools = cache(sequences * width, kv_heads, head_dim, dtype, device)
    k_scales, v_scales = pools[2:] if dtype in LARGEST else (None, None)
    table = torch.randperm(sequences * width, device=device).view(sequences, width).int()
    q = torch.randn(sequences * queries, heads, head_dim, device=device).bfloat16()
    starts = torch.arange(0, sequences * queries + 1, queries, device=device).int()
    lengths = torch.full((sequences,), length, device=device).int()
    scale = head_dim**-0.5

    def ours() -> Tensor:
        return plugins.paged_attention(q, pools[0], pools[1], starts, lengths, table, scale, 0, k_scales, v_scales)

    seconds = best_seconds(ours, device)
    sdpa = None
    if dtype == torch.bfloat16:
        k, v = (
            pool[table.long()].view(sequences, -1, kv_heads, head_dim)[:, :length].transpose(1, 2).contiguous()
            for pool in pools
        )
        dense = q.view(sequences, queries, heads, head_dim).transpose(1, 2)
        causal = queries == length
        if causal or queries == 1:
            sdpa = best_seconds(
                lambda: F.scaled_dot_product_attention(dense, k, v, is_causal=causal, enable_gqa=True), device
            )
    flops = sequences * attention_flops(queries, length, heads, head_dim)
    num_bytes = sequences * attention_bytes(queries, length, heads, kv_heads, head_dim, dtype)
    kind = "decode" if queries == 1 else "prefill"
    return row(f"{kind} {sequences}x{length} {dtype_name}", seconds, sdpa, flops, num_bytes, peak)


def bench_write(
    tokens: int, dtype_name: str, device: str, peak: dict[str, float], kv_heads: int = 8, head_dim: int = 128
) -> dict[str, Any]:
    """Return one row: K and V of ``tokens``, rotated and written."""
    dtype = DTYPES[dtype_name]
    pools = cache(tokens // PAGE_SIZE + 1, kv_heads, head_dim, dtype, device)
    k, v = (torch.randn(tokens, kv_heads, head_dim, device=device).bfloat16() for _ in range(2))
    angle = torch.rand(tokens, head_dim // 2, device=device)
    arguments = (k, v, angle.cos(), angle.sin(), torch.randperm(tokens, device=device).int(), *pools)
    seconds = best_seconds(lambda: plugins.rope_paged_kv_write(*arguments), device)
    per_head = head_dim * (2 + dtype.itemsize) + (4 if dtype in LARGEST else 0)
    num_bytes = tokens * (2 * kv_heads * per_head + head_dim * 4)
    return row(f"write {tokens} {dtype_name}", seconds, None, 0.0, num_bytes, peak)


def row(
    case: str, seconds: float, sdpa: float | None, flops: float, num_bytes: float, peak: dict[str, float]
) -> dict[str, Any]:
    """Return a row; its share of the peak is that of the tighter floor."""
    floor = max(flops / peak["tflops"] / 1e12, num_bytes / peak["gb_per_s"] / 1e9)
    return {
        "case": case,
        "kvforge_ms": seconds * 1e3,
        "sdpa_ms": None if sdpa is None else sdpa * 1e3,
        "tflops": flops / seconds / 1e12,
        "gb_per_s": num_bytes / seconds / 1e9,
        "share_of_peak": floor / seconds,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [f"{COLUMNS[0]:<26}" + "".join(f"{name:>15}" for name in COLUMNS[1:])]
    for entry in rows:
        values = ("-" if entry[name] is None else f"{entry[name]:.3f}" for name in COLUMNS[1:])
        lines.append(f"{entry['case']:<26}" + "".join(f"{value:>15}" for value in values))
    return "\n".join(lines)


def run(device: str) -> dict[str, Any]:
    """Measure everything; returns the report."""
    peak = peaks(device)
    small = device == "cpu"
    formats = ("bf16", "fp8") if small else tuple(DTYPES)
    prefills = ((1, 64),) if small else ((1, 2048), (1, 8192), (1, 32768), (8, 2048))
    decodes = ((2, 128),) if small else ((1, 8192), (1, 131072), (16, 8192), (64, 8192), (4, 131072))
    rows = []
    for name in formats:
        rows += [bench_attention(s, n, n, name, device, peak) for s, n in prefills]
        rows += [bench_attention(s, 1, n, name, device, peak) for s, n in decodes]
        rows += [bench_write(n, name, device, peak) for n in ((64,) if small else (64, 8192))]
    machine = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {
        "command": "python -m perf.gpu.operators " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{machine}, torch {torch.__version__}",
        "peak": peak,
        "rows": rows,
    }


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, measure, print a table and write the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="write the results here (default: $OUT/operators.json if OUT is set)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; try --device cpu")
    torch.manual_seed(0)
    if options.device == "cuda":
        cuda_ops.register()
    else:
        plugins.load_library()
    report = run(options.device)
    print(table(report["rows"]))
    path = options.json or (Path(os.environ["OUT"]) / "operators.json" if "OUT" in os.environ else None)
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
