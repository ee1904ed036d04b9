"""Decoding long contexts in large batches on one GPU: Llama-3.1-8B's shape, full attention beside ShadowKV.

    PYTHONPATH=. python -m perf.gpu.shadowkv --json perf/results/shadowkv-h200.json

The batches are those of the paper's table (arXiv 2410.21465; A100, tokens/s): 60K, 160.93 at batch 8 against 472.77 at
48; 122K, 80.78 at batch 4 against 245.90 at 24, 3.04 times. Weights are random, caches synthetic
(``perf.shadowkv.decode``): prompts are not computed, and the hit rate is set, to 0 and to 0.6. ShadowKV's values lie in
main memory that is mapped for the GPU, one piece for all layers: each layer fetches its own number of bytes, but 48
sequences' own values in all layers would take 180 GiB. A floor is the bytes that a step reads of GPU memory over the
rate of a large copy, or those it fetches from main memory over the rate of a copy from there, whichever is longer, both
measured in the same run. Not measured yet. `--device cpu --tiny` goes the same way on a CPU.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.manifest import Manifest
from kvforge.runtime.sessions.cuda import CudaSession
from kvforge.runtime.sessions.pools import device_bytes, host_bytes
from perf.gpu import models
from perf.gpu.machine import Kept, device_name, gpu_parser, host_copy_rate, machine_rates, parse_checked, synchronize
from perf.gpu.models import LLAMA_8B, TINY, Limits, Variant
from perf.harness.command import run_main
from perf.harness.options import option
from perf.shadowkv.decode import Load, SyntheticDecode, kept, traffic

HIT_RATES = (0.0, 0.6)
PUBLISHED = {61440: 472.77 / 160.93, 124928: 245.90 / 80.78}
"""ShadowKV's tokens/s over full attention's, by context."""


@dataclass(frozen=True)
class Case:
    """One context: the batch of full attention, and ShadowKV's with its policy."""

    context: int
    full_batch: int
    batch: int
    policy: ShadowKV


CASES = (
    Case(61440, 8, 48, ShadowKV(sparse_budget=1024)),
    Case(124928, 4, 24, ShadowKV(sparse_budget=2048)),
)
TINY_CASES = (Case(400, 2, 3, ShadowKV(rank=32, sparse_budget=64, num_outlier_chunks=4)),)


def limits_of(cases: tuple[Case, ...], device: str) -> Limits:
    """Return limits that hold for all cases."""
    return Limits(
        max_num_seqs=max(max(case.full_batch, case.batch) for case in cases),
        max_num_tokens=max(64, *(case.batch for case in cases)),
        max_seq_len=max(case.context for case in cases) + 64,
        page_size=64 if device == "cuda" else 16,
    )


def floor_s(manifest: Manifest, load: Load, hit_rate: float, rates: dict[str, float]) -> float:
    """Return the seconds that a step takes at least, fetches from main memory overlapping all else."""
    read = traffic(manifest, load, hit_rate)
    on_device = (manifest.weight_bytes + read.device) / rates["copy_bytes_per_s"]
    return max(on_device, read.host / rates["host_copy_bytes_per_s"])


def bench_engine(
    name: str, policy: str, loads: list[Load], limits: Limits, options: argparse.Namespace, rates: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """Compile an engine where it is not yet, and yield a row for each load and hit rate."""
    device, folder = options.device, options.work / options.device / name
    variant = Variant(kv_policy=policy)
    config = models.model_config(TINY if options.tiny else LLAMA_8B, variant)
    resolved = models.resolved_options(config, variant, limits, device)
    models.compile_graphs(config, resolved, folder)
    manifest = models.manifest_of(config, resolved)
    session = models.open_session(manifest, models.random_weights(config, resolved), folder)
    for load in loads:
        decode = SyntheticDecode(session, load, share_values=True)  # the first pool's host memory is all there is
        for wanted in HIT_RATES if decode.policy else (1.0,):
            times, measured = decode.seconds(options.steps, wanted, lambda: synchronize(device))
            step, formula = statistics.median(times), kept(manifest, load)
            yield {
                "engine": name, **asdict(load), "hit_rate": wanted, "measured_hit_rate": measured, "step_s": step,
                "tok_s": load.batch / step, "floor_s": floor_s(manifest, load, wanted, rates),
                "device_cache_bytes": device_bytes(manifest, decode.pools),
                "host_cache_bytes": host_bytes(manifest, decode.pools[:1]), "formula_device_bytes": formula[0],
                "formula_host_bytes": formula[1],
            }  # fmt: skip
        del decode
        if isinstance(session, CudaSession):
            torch.cuda.empty_cache()


def add_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, those of ShadowKV with their tokens/s over full attention's and the published ratio."""
    full = {row["context"]: row["tok_s"] for row in rows if row["engine"] == "full"}
    return [
        row
        if row["engine"] == "full"
        else {**row, "ratio": row["tok_s"] / full[row["context"]], "published_ratio": PUBLISHED.get(row["context"])}
        for row in rows
    ]


COLUMNS = (
    ("engine", "engine", "<16"), ("context", "context", ">11"), ("batch", "batch", ">11"),
    ("hits", "measured_hit_rate", ">11.2f"), ("tok/s", "tok_s", ">11.1f"), ("step ms", "step_s", ">11.2f", 1e3),
    ("floor ms", "floor_s", ">11.2f", 1e3), ("device GiB", "device_cache_bytes", ">11.2f", 2**-30),
    ("host GiB", "formula_host_bytes", ">11.2f", 2**-30), ("ratio", "ratio", ">11.2f"),
)  # fmt: skip


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = gpu_parser(
        __doc__, "shadowkv", "contexts",
        option("--contexts", nargs="+", type=int, metavar="N", help="context lengths (default: all)"),
        option("--steps", type=int, default=32, help="timed steps of each row (default 32)"),
    )  # fmt: skip
    options = parse_checked(parser, arguments)
    cases = TINY_CASES if options.tiny else CASES
    known = [case.context for case in cases]
    if options.contexts and not set(options.contexts) <= set(known):
        parser.error(f"there are cases of {known} tokens only")
    options.cases = tuple(case for case in cases if case.context in (options.contexts or known))
    return options


def main(arguments: list[str] | None = None) -> None:
    """Compile, measure, print a table and write the report."""
    options = parse_arguments(arguments)
    cases, device = options.cases, options.device
    rates = machine_rates(device) | {"host_copy_bytes_per_s": host_copy_rate(device)}
    found = Kept("perf.gpu.shadowkv", arguments, options, COLUMNS, "", rates=rates)
    found.report |= {"device": device_name(device), "torch": torch.__version__}
    engines = [("full", "full", [Load(case.context, case.full_batch) for case in cases])]
    engines += [(f"shadowkv-{c.policy.sparse_budget}", str(c.policy), [Load(c.context, c.batch)]) for c in cases]
    for engine in engines:
        for row in bench_engine(*engine, limits_of(cases, device), options, rates):
            found.add(row)
            found.write(rows=add_ratios(found.rows))
    print(found.table(add_ratios(found.rows)))


if __name__ == "__main__":
    raise SystemExit(run_main(main))
