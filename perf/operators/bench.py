"""Times the operators' CPU kernels beside torch's attention, the reference, and the machine's floor.

    python -m perf.operators.bench --json perf/results/operators-cpu.json

The cases are those of `plugins/<operator>/bench.py`.

The floor of prefill is its FLOPs (the causal half only) at the rate of a large bfloat16 or float32 matrix
product, that of decode, cache writes and the selection of chunks their bytes at the bandwidth of a large copy
(read + write), both measured in the same run. Times are the best of several runs, in milliseconds; with --cpu-time
they are CPU time of a single thread, for a machine whose cores other programs share. `--kv-dtype fp8 int8` adds decode
and cache writes on 8-bit pools (torch's attention stays on the unquantized values), `--only decode` keeps the
cases whose name contains one of the words.
"""

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import plugins
from perf.harness.command import make_parser
from perf.harness.options import flag, option, place
from perf.harness.rates import gemm_rate
from plugins.benchmark import KV_DTYPES, Benchmark
from plugins.registry import modules

COLUMNS = ("kvforge_ms", "sdpa_ms", "attention_ms", "linear_ms", "reference_ms", "floor_ms", "floor_share")
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
    wide = gemm_rate(torch.mm, lambda n: torch.randn(2, n, n), 2048, 3)
    narrow = gemm_rate(torch.mm, lambda n: torch.randn(2, n, n).bfloat16(), 2048, 3, least=wide / 2)
    rates = {"gemm_bfloat16_gflops": narrow / 1e9, "gemm_float32_gflops": wide / 1e9}
    source = torch.ones(256 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    rates["copy_gb_per_s"] = 2 * source.numel() / best_ms(lambda: target.copy_(source), seconds) / 1e6
    return rates


def measure(operator: str, benchmark: Benchmark, rates: dict[str, float], seconds: float) -> dict[str, Any]:
    """One row of the report."""
    times = {column: best_ms(run, seconds) for column, run in benchmark.runs.items()}
    floor_ms = benchmark.floor_ms(rates)
    return {
        "operator": operator, "case": benchmark.case, **times, "floor_ms": floor_ms,
        "floor_share": floor_ms / times["kvforge_ms"],
    }  # fmt: skip


def words(kv_dtypes: Sequence[str]) -> list[str]:
    """The words that the cases of these caches are named with."""
    return sorted({word for _, module in modules("bench") for word, _ in module.benchmarks(kv_dtypes)})


PARSER = make_parser(
    __doc__, place("--json", "also write the results to this file"),
    option("--seconds", type=float, default=1.0, help="time for each measurement"),
    option("--kv-dtype", nargs="+", choices=KV_DTYPES, default=["same"], help="what caches hold; default: the dtype"),
    option("--only", nargs="+", default=[], help=", ".join(words(["same"]))),
    option("--threads", type=int, default=torch.get_num_threads()),
    option("--note", default="", help="kept with the results, e.g. what else ran"),
    flag("--cpu-time", "measure CPU time, of one thread"),
)  # fmt: skip


def main() -> int:
    options = PARSER.parse_args()
    there = words(options.kv_dtype)
    for part in options.only:
        if not any(part in word for word in there):
            PARSER.error(f"no case is named {part}; give some of {', '.join(there)} to --only")
    if options.cpu_time:
        global _clock
        _clock, options.threads = time.thread_time, 1
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    plugins.load_library()
    before, rates = os.getloadavg()[0], machine_rates(options.seconds)
    results = []

    for name, module in modules("bench"):
        for word, make in module.benchmarks(options.kv_dtype):
            if not options.only or any(part in word for part in options.only):
                results.append(measure(name, make(), rates, options.seconds))
    print("  ".join(f"{name:>12}" for name in COLUMNS), " case")
    for result in results:
        cells = (f"{result[name]:12.3f}" if name in result else " " * 12 for name in COLUMNS)
        print("  ".join(cells), "", result["operator"], result["case"])
    print(", ".join(f"{name} {value:.1f}" for name, value in rates.items()))
    if options.json:
        machine = {"arch": platform.machine(), "threads": options.threads}
        report = {
            "command": shlex.join(["python", "-m", "perf.operators.bench", *sys.argv[1:]]), "note": options.note,
            "machine": machine | {"clock": _clock.__name__, "torch": torch.__version__},
            "load_average": [before, os.getloadavg()[0]], "rates": rates, "results": results,
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=0) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
