"""Times the operators' CPU kernels beside torch's attention, the reference, and the machine's floor.

    python -m perf.operators.bench --json perf/results/operators-cpu.json

The floor of prefill is its FLOPs (the causal half only) at the rate of a large bfloat16 or float32 matrix
product, that of decode, cache writes and the selection of chunks their bytes at the bandwidth of a large copy
(read + write), both measured in the same run. Times are the best of several runs, in milliseconds; with --cpu-time
they are CPU time of a single thread, for a machine whose cores other programs share. `--kv-dtype fp8 int8` adds decode
and cache writes on 8-bit pools (torch's attention stays on the unquantized values), `--only decode` keeps the
cases whose name contains one of the words.
"""

import itertools
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import plugins
from perf.harness.command import make_parser
from plugins.kv_quantization import dynamic_scale, quantize
from plugins.packed_linear import pack

PAGE_SIZE = 32
KV_DTYPES = {"same": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
COLUMNS = ("operator", "case", "kvforge_ms", "sdpa_ms", "linear_ms", "reference_ms", "floor_ms", "floor_share")


_clock: Callable[[], float] = time.perf_counter


def best_ms(function: Callable[[], Any], seconds: float) -> float:
    """The shortest of the runs that fit in `seconds`, at least two, after one that is not counted."""
    function()
    best, end, runs = float("inf"), time.perf_counter() + seconds, 0
    while runs < 2 or time.perf_counter() < end:
        start = _clock()
        function()
        best = min(best, _clock() - start)
        runs += 1
    return best * 1e3


def machine_rates(seconds: float) -> dict[str, float]:
    """GFLOP/s of matrix products and GB/s of a copy, on all threads."""
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
        rates[f"gemm_{str(dtype)[6:]}_gflops"] = 2 * 2048**3 / best_ms(lambda a=a, b=b: a @ b, seconds) / 1e6
    source = torch.ones(256 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    rates["copy_gb_per_s"] = 2 * source.numel() / best_ms(lambda: target.copy_(source), seconds) / 1e6
    return rates


def row(operator: str, case: str, times: dict[str, float], floor_ms: float) -> dict[str, Any]:
    return {
        "operator": operator,
        "case": case,
        **times,
        "floor_ms": floor_ms,
        "floor_share": floor_ms / times["kvforge_ms"],
    }


def cache(values: torch.Tensor, kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The pool that holds these vectors, and its scales."""
    dtype = KV_DTYPES[kv_dtype]
    if dtype is None:
        return values, None
    scales = dynamic_scale(values, dtype)
    return quantize(values, scales[..., None], dtype), scales


def bench_attention(
    sequences: int,
    queries: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: str,
    rates: dict[str, float],
    seconds: float,
) -> dict[str, Any]:
    width = -(-length // PAGE_SIZE)
    shape = (sequences * width, PAGE_SIZE, kv_heads, head_dim)
    values = [torch.randn(shape).to(dtype) for _ in range(2)]
    (k_pool, k_scales), (v_pool, v_scales) = (cache(x, kv_dtype) for x in values)
    page_table = torch.randperm(sequences * width).view(sequences, width).int()
    q = torch.randn(sequences * queries, heads, head_dim).to(dtype)
    query_start = torch.arange(0, sequences * queries + 1, queries).int()
    step = (query_start, torch.full((sequences,), length).int(), page_table)
    args = (q, k_pool, v_pool, *step, head_dim**-0.5, 0, k_scales, v_scales)

    def dense(x: torch.Tensor) -> torch.Tensor:
        return x[page_table.long()].view(sequences, -1, kv_heads, head_dim)[:, :length].transpose(1, 2).contiguous()

    k, v = (dense(x) for x in values)
    dense_q = q.view(sequences, queries, heads, head_dim).transpose(1, 2)
    causal = queries > 1
    reference = plugins.OPERATORS["paged_attention"].reference
    times = {
        "kvforge_ms": best_ms(lambda: plugins.paged_attention(*args), seconds),
        "sdpa_ms": best_ms(
            lambda: F.scaled_dot_product_attention(dense_q, k, v, is_causal=causal, enable_gqa=True), seconds
        ),
        "reference_ms": best_ms(lambda: reference(*args), seconds),
    }
    if causal:
        flops = 4 * sequences * heads * head_dim * queries * (length - (queries - 1) / 2)
        floor = flops / rates[f"gemm_{str(dtype)[6:]}_gflops"] / 1e6
    else:
        bytes_per_head = head_dim * k_pool.dtype.itemsize + (0 if k_scales is None else 4)
        floor = 2 * sequences * length * kv_heads * bytes_per_head / rates["copy_gb_per_s"] / 1e6
    kind = "prefill" if causal else "decode"
    case = f"{kind} {sequences}x{length} heads {heads}/{kv_heads} dim {head_dim} {str(dtype)[6:]}{on_cache(kv_dtype)}"
    return row("paged_attention", case, times, floor)


def on_cache(kv_dtype: str) -> str:
    return "" if kv_dtype == "same" else f" on {kv_dtype}"


def bench_write(
    tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: str,
    rates: dict[str, float],
    seconds: float,
) -> dict[str, Any]:
    k, v = (torch.randn(tokens, kv_heads, head_dim).to(dtype) for _ in range(2))
    angle = torch.rand(tokens, head_dim // 2)
    shape = (tokens // PAGE_SIZE + 1, PAGE_SIZE, kv_heads, head_dim)
    (k_pool, k_scales), (v_pool, v_scales) = (cache(torch.zeros(shape).to(dtype), kv_dtype) for _ in range(2))
    args = (k, v, angle.cos(), angle.sin(), torch.randperm(tokens).int(), k_pool, v_pool, k_scales, v_scales)
    times = {
        "kvforge_ms": best_ms(lambda: plugins.rope_paged_kv_write(*args), seconds),
        "reference_ms": best_ms(lambda: plugins.OPERATORS["rope_paged_kv_write"].reference(*args), seconds),
    }
    stored = k_pool.dtype.itemsize + (0 if k_scales is None else 4 / head_dim)
    num_bytes = 2 * k.numel() * (dtype.itemsize + stored) + 2 * angle.numel() * 4
    case = f"{tokens} tokens kv heads {kv_heads} dim {head_dim} {str(dtype)[6:]}{on_cache(kv_dtype)}"
    return row("rope_paged_kv_write", case, times, num_bytes / rates["copy_gb_per_s"] / 1e6)


def bench_reconstruct(
    sequences: int,
    keys: int,
    missed: float,
    rank: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    rates: dict[str, float],
    seconds: float,
) -> dict[str, Any]:
    """Sequences of 8192 keys of which `keys` are selected per head, a share of them missed, in chunks of 8;
    the floor is the matrix product of those."""
    u = torch.randn(sequences * 8192, rank).to(dtype)
    sv = torch.randn(sequences, kv_heads, rank, head_dim).to(dtype)
    chunks = torch.randint(0, len(u) // 8, (sequences * keys // 8, 1, kv_heads))
    positions = (chunks * 8 + torch.arange(8)[:, None]).view(-1, kv_heads).int()
    absent = torch.rand(chunks.shape).repeat(1, 8, 1).view(-1, kv_heads) >= missed
    rows = positions.masked_fill(absent, -1)
    angle = torch.rand(len(u), head_dim // 2)
    starts = torch.arange(0, sequences * keys + 1, keys).int()
    args = (u, sv, starts, rows, positions, angle.cos(), angle.sin())
    times = {
        "kvforge_ms": best_ms(lambda: plugins.low_rank_key_reconstruct(*args), seconds),
        "reference_ms": best_ms(lambda: plugins.OPERATORS["low_rank_key_reconstruct"].reference(*args), seconds),
    }
    flops = 2 * int((~absent).sum()) * rank * head_dim
    case = (
        f"{sequences}x{keys} keys {missed:.0%} missed rank {rank} kv heads {kv_heads} dim {head_dim} {str(dtype)[6:]}"
    )
    return row("low_rank_key_reconstruct", case, times, flops / rates[f"gemm_{str(dtype)[6:]}_gflops"] / 1e6)


def bench_select(
    sequences: int,
    chunks: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    rates: dict[str, float],
    seconds: float,
) -> dict[str, Any]:
    """A sixteenth of the chunks is selected; enough layers' landmarks that they come from memory, read once."""
    per_page, selected = 4, chunks // 16
    pages = sequences * -(-chunks // per_page)
    shape = (pages, per_page, kv_heads, head_dim)
    count = max(1, (96 << 20) // (math.prod(shape) * dtype.itemsize))
    landmarks = [torch.randn(shape).to(dtype) for _ in range(count)]
    is_outlier = (torch.rand(shape[:3]) < 48 / chunks).byte()
    q = torch.randn(sequences, heads, head_dim).to(dtype)
    table = torch.randperm(pages).view(sequences, -1).int()
    step = (torch.arange(sequences + 1).int(), table, *(torch.full((sequences,), n).int() for n in (chunks, selected)))
    used = itertools.cycle(landmarks)

    def run(operator: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: operator(q, next(used), is_outlier, *step, head_dim**-0.5, selected)

    times = {
        "kvforge_ms": best_ms(run(plugins.landmark_select), seconds),
        "reference_ms": best_ms(run(plugins.OPERATORS["landmark_select"].reference), seconds),
    }
    case = f"{sequences}x{chunks} chunks heads {heads}/{kv_heads} dim {head_dim} {str(dtype)[6:]}"
    return row("landmark_select", case, times, landmarks[0].nbytes / rates["copy_gb_per_s"] / 1e6)


def bench_selected(
    sequences: int,
    places: int,
    missed: float,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    rates: dict[str, float],
    seconds: float,
) -> list[dict[str, Any]]:
    """Two selections in turn, a share of each not in the other: the update of the chunk cache, whose floor is its
    lists, and what brings the missed ones in, whose floor is the products at rank 160 or, if longer, its bytes."""
    chunk_size, chunks, rank = 8, 2 * places, 160
    pages = sequences * chunks * chunk_size // PAGE_SIZE
    one = torch.arange(places).expand(sequences, kv_heads, places)
    moved = torch.rand(one.shape) < missed
    selections = itertools.cycle([one.int(), (one + places * moved).sort().values.int()])
    cached, counts = torch.full(one.shape, -1).int(), torch.zeros(sequences, kv_heads, 2, dtype=torch.int64)
    slot = torch.arange(sequences).int()
    update = plugins.OPERATORS["chunk_cache_update"].reference
    times = {
        "kvforge_ms": best_ms(lambda: plugins.chunk_cache_update(next(selections), cached, counts, slot), seconds),
        "reference_ms": best_ms(lambda: update(next(selections), cached, counts, slot), seconds),
    }
    lists = plugins.chunk_cache_update(next(selections), cached, counts, slot)
    case = f"{sequences}x{places} places {missed:.0%} missed kv heads {kv_heads}"
    results = [row("chunk_cache_update", case, times, 4 * lists[0].nbytes / rates["copy_gb_per_s"] / 1e6)]
    tables = [torch.randperm(pages).view(sequences, -1).int() for _ in range(2)]
    u = torch.randn(pages, PAGE_SIZE, rank).to(dtype)
    sv = torch.randn(sequences, kv_heads, rank, head_dim).to(dtype)
    host_v, *pools = (torch.randn(pages, PAGE_SIZE, kv_heads, head_dim).to(dtype) for _ in range(3))
    angle = torch.rand(chunks * chunk_size, head_dim // 2)
    args = (u, sv, host_v, slot, *lists, *tables, angle.cos(), angle.sin(), chunk_size, *pools)
    times = {"kvforge_ms": best_ms(lambda: plugins.selected_kv_write(*args), seconds)}
    tokens = int((lists[0] >= 0).sum()) * chunk_size
    flops = 2 * tokens * rank * head_dim / rates[f"gemm_{str(dtype)[6:]}_gflops"] / 1e6
    num_bytes = tokens * (rank + 3 * head_dim) * dtype.itemsize / rates["copy_gb_per_s"] / 1e6
    case += f" rank {rank} dim {head_dim} {str(dtype)[6:]}"
    return [*results, row("selected_kv_write", case, times, max(flops, num_bytes))]


def bench_verify(
    sequences: int, drafts: int, vocab: int, temperature: float, rates: dict[str, float], seconds: float
) -> dict[str, Any]:
    """Drafts that are all accepted, drawn from the target's own distribution; its floor reads the logits once."""
    num_rows = sequences * (drafts + 1)
    logits = torch.randn(num_rows, vocab) * 3
    draft_rows = [row for row in range(num_rows) if row % (drafts + 1) < drafts]
    args = (
        logits,
        logits[draft_rows].argmax(-1).int(),
        torch.arange(0, sequences * drafts + 1, drafts).int(),
        torch.softmax(logits[draft_rows] / max(temperature, 1e-3), dim=-1),
        torch.full((sequences,), temperature),
        torch.full((num_rows, 2), 0.5),
    )
    times = {
        "kvforge_ms": best_ms(lambda: plugins.speculative_verify(*args), seconds),
        "reference_ms": best_ms(lambda: plugins.OPERATORS["speculative_verify"].reference(*args), seconds),
    }
    case = f"{sequences}x{drafts} drafts vocabulary {vocab} temperature {temperature}"
    return row("speculative_verify", case, times, logits.nbytes / rates["copy_gb_per_s"] / 1e6)


def bench_linear(
    tokens: int, outputs: int, depth: int, dtype: torch.dtype, rates: dict[str, float], seconds: float
) -> dict[str, Any]:
    """Beside torch's linear layer in bfloat16; enough weights that they come from memory. The floor is the greater of
    their bytes and, with bfloat16 weights, the matrix product."""
    count = max(1, (96 << 20) // (outputs * depth * 2))
    weights = [torch.randn(outputs, depth).bfloat16() for _ in range(count)]
    packed = [pack(weight, dtype) for weight in weights]
    x = torch.randn(tokens, depth).bfloat16()
    used = itertools.cycle(range(count))

    def ours() -> torch.Tensor:
        weight, scales = packed[next(used)]
        return plugins.packed_linear(x, weight, outputs, scales=scales)

    times = {
        "kvforge_ms": best_ms(ours, seconds),
        "linear_ms": best_ms(lambda: F.linear(x, weights[next(used)]), seconds),
    }
    floor = packed[0][0].nbytes / (rates["copy_gb_per_s"] * 1e6)
    if dtype == torch.bfloat16:
        floor = max(floor, 2 * tokens * outputs * depth / rates["gemm_bfloat16_gflops"] / 1e6)
    return row("packed_linear", f"{tokens} tokens {outputs}x{depth} {str(dtype)[6:]} weights", times, floor)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    parser.add_argument(
        "--kv-dtype", nargs="+", choices=KV_DTYPES, default=["same"], help="what caches hold; default: the dtype"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="prefill, decode, write, reconstruct, select, chunks, linear or verify"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--note", default="", help="kept with the results, e.g. what else ran")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, of one thread")
    options = parser.parse_args()
    if options.cpu_time:
        global _clock
        _clock, options.threads = time.thread_time, 1
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    plugins.load_library()
    before, rates = os.getloadavg()[0], machine_rates(options.seconds)
    results = []

    def bench(function: Callable[..., Any], name: str, *case: Any) -> None:
        if not options.only or any(word in name for word in options.only):
            result = function(*case, rates, options.seconds)
            results.extend(result if isinstance(result, list) else [result])

    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((16, 16, 64), (16, 4, 64), (16, 8, 128)):
            bench(bench_attention, "prefill", 1, 2048, 2048, *shape, dtype, "same")
        for kv_dtype in options.kv_dtype:
            for shape in ((16, 4, 64), (16, 8, 128), (16, 2, 128)):
                bench(bench_attention, "decode", 8, 1, 2048, *shape, dtype, kv_dtype)
            bench(bench_attention, "decode", 1, 1, 32768, 32, 8, 128, dtype, kv_dtype)
            bench(bench_write, "write", 2048, 8, 128, dtype, kv_dtype)
        for sequences, keys, missed, head_dim in ((1, 2048, 1.0, 128), (8, 2048, 0.4, 128), (8, 256, 0.4, 64)):
            bench(bench_reconstruct, "reconstruct", sequences, keys, missed, 160, 8, head_dim, dtype)
        for sequences, chunks, *shape in ((1, 16384, 32, 8, 128), (8, 4096, 32, 8, 128), (8, 256, 16, 4, 64)):
            bench(bench_select, "select", sequences, chunks, *shape, dtype)
        for sequences, places, missed, *shape in ((8, 256, 0.4, 8, 128), (8, 32, 0.4, 4, 64)):
            bench(bench_selected, "chunks", sequences, places, missed, *shape, dtype)
    for dtype in (torch.bfloat16, torch.int8):
        for tokens in (1, 8, 2048):
            for outputs, depth in ((1536, 1024), (5632, 1024), (1024, 2816)):
                bench(bench_linear, "linear", tokens, outputs, depth, dtype)
    for temperature in (0.0, 0.8):
        bench(bench_verify, "verify", 8, 4, 128256, temperature)
    print("  ".join(f"{name:>12}" for name in COLUMNS[2:]), " case")
    for result in results:
        cells = (f"{result[name]:12.3f}" if name in result else " " * 12 for name in COLUMNS[2:])
        print("  ".join(cells), "", result["operator"], result["case"])
    print(", ".join(f"{name} {value:.1f}" for name, value in rates.items()))
    if options.json:
        report = {
            "command": shlex.join(["python", "-m", "perf.operators.bench", *sys.argv[1:]]),
            "note": options.note,
            "machine": {
                "arch": platform.machine(),
                "threads": options.threads,
                "clock": _clock.__name__,
                "torch": torch.__version__,
            },
            "load_average": [before, os.getloadavg()[0]],
            "rates": rates,
            "results": results,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
