"""Decode step time over the context, full attention beside ShadowKV at a fixed budget, on this CPU.

    python -m perf.shadowkv.speed [--context 2048 …] [--batch 1 4] [--work DIR]

A random model of four layers of 8 KV heads x 128, so that attention dominates. Caches are synthetic
(``perf.shadowkv.decode``): a 32K prompt is not computed. The hit rate is set: 0, where every selected chunk is fetched
and rebuilt, and 0.6. Floors are the bytes that a step reads, over the best rate of a plain read measured in the same
run. Rows are kept: a run adds its own to those in OUTPUT.json and draws OUTPUT.svg of all.
"""

import argparse
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.manifest import Manifest, load_manifest
from kvforge.runtime.sessions.session import load_session
from perf.engine.floors import measure_rates
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Report, chosen, flag, option, output, work
from perf.harness.machine import machine_fields
from perf.harness.plots import panels
from perf.harness.random_checkpoint import LLAMA_213M, cached_checkpoint
from perf.harness.tables import columns_table
from perf.shadowkv.decode import Load, SyntheticDecode, kept, traffic

CONTEXTS = (2048, 4096, 8192, 16384, 32768)
MODEL: dict[str, Any] = LLAMA_213M | {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
POLICIES = {"full": "full", "shadowkv": "shadowkv:rank=160,sparse_budget=1024"}
HIT_RATES = {"full": (1.0,), "shadowkv": (0.0, 0.6)}


def engine_of(policy: str, work: Path) -> Path:
    """Return the engine of a policy, built if it is not there yet."""
    limits = {"max_num_seqs": 4, "max_num_tokens": 256, "max_seq_len": CONTEXTS[-1] + 64}
    options = BuildOptions(dtype="bfloat16", kv_policy=POLICIES[policy], **limits)
    return cached_engine(work / policy, lambda: cached_checkpoint(work / "checkpoint", MODEL), options)


def floor_bytes(manifest: Manifest, load: Load, hit_rate: float) -> float:
    """Return the bytes that a step reads at least: all weights once, caches and, of misses, values and factors."""
    read = traffic(manifest, load, hit_rate)
    return manifest.weight_bytes + read.device + read.host


def measure(policy: str, engine: Path, load: Load, steps: int, read_rate: float) -> list[dict[str, Any]]:
    """Return a row for each hit rate."""
    manifest = load_manifest(engine)
    decode = SyntheticDecode(load_session(engine, manifest), load)
    rows = []
    for wanted in HIT_RATES[policy]:
        times, measured = decode.seconds(steps, wanted, lambda: None)
        num_bytes = floor_bytes(manifest, load, wanted)
        device, host = kept(manifest, load)
        rows.append({
            "policy": policy, **asdict(load), "hit_rate": wanted, "measured_hit_rate": measured,
            "step_s": statistics.median(times), "best_step_s": min(times), "floor_bytes": num_bytes,
            "floor_s": num_bytes / read_rate, "cache_bytes": device, "host_cache_bytes": host,
        })  # fmt: skip
    return rows


def name_of(row: dict[str, Any]) -> str:
    """The name of a row's curve."""
    return "full attention" if row["policy"] == "full" else f"ShadowKV, {row['hit_rate']:.0%} hits"


def plot(report: Report, path: Path) -> None:
    """Step time over context, a panel for each batch; dashed: the floor."""
    rows = report["rows"]
    batches = sorted({row["batch"] for row in rows})
    with panels(path, 5.5 * len(batches), 4.2, len(batches)) as found:
        for axes, batch in zip(found, batches, strict=True):
            own = sorted((row for row in rows if row["batch"] == batch), key=lambda row: row["context"])
            for index, name in enumerate(sorted({name_of(row) for row in own})):
                line = [row for row in own if name_of(row) == name]
                x = [row["context"] for row in line]
                axes.plot(x, [1e3 * row["step_s"] for row in line], "o-", color=f"C{index}", label=name)
                axes.plot(x, [1e3 * row["floor_s"] for row in line], "--", color=f"C{index}", linewidth=1)
            axes.set(xlabel="context, tokens", ylabel="decode step, ms", title=f"batch {batch}", ylim=(0, None))
            ticks = [row["context"] for row in own if row["policy"] == "full"]
            axes.set_xticks(ticks)
            axes.set_xticklabels([f"{context // 1024}K" for context in ticks])
        told = "Four layers, 8 KV heads x 128, bf16, one CPU; dashed: bytes read over the rate of a plain read"
        found[0].figure.suptitle(told)


COLUMNS = (
    ("batch", "batch"), ("context", "context"), ("cache", lambda row: name_of(row)), ("step, ms", "step_s", ".2f", 1e3),
    ("floor, ms", "floor_s", ".2f", 1e3), ("cache, MiB", lambda row: sizes_of(row)),
)  # fmt: skip


def sizes_of(row: dict[str, Any]) -> str:
    """The MiB of a row's caches."""
    host = f" + {row['host_cache_bytes'] / 2**20:.0f} host" if row["host_cache_bytes"] else ""
    return f"{row['cache_bytes'] / 2**20:.0f}{host}"


def table(report: Report) -> str:
    """Return the rows as a Markdown table."""
    rows = sorted(report["rows"], key=lambda row: (row["batch"], row["context"], name_of(row)))
    return columns_table(COLUMNS, rows) + "\n"


def run(args: argparse.Namespace) -> Report:
    """Measure every cell; what is known of others stays."""
    engines = {policy: engine_of(policy, args.work) for policy in args.policy}
    rates, rows = measure_rates(), []
    cells = [(policy, Load(context, batch)) for batch in args.batch for context in args.context for policy in engines]
    for policy, load in tqdm(cells, unit="cell", disable=None):
        rows += measure(policy, engines[policy], load, args.steps, rates.read)
    return {"policies": POLICIES, **machine_fields(), "threads": torch.get_num_threads(), "rows": rows}


def build_only(args: argparse.Namespace) -> bool:
    """Build the engines where nothing else is asked for."""
    return args.build_only and all(engine_of(policy, args.work) for policy in args.policy)


EXPERIMENT = Experiment(
    "perf.shadowkv.speed", __doc__,
    options=(
        work("runs/shadowkv-speed", "checkpoint and engines"),
        option("--context", type=int, nargs="+", default=list(CONTEXTS), metavar="N", help="default: all"),
        option("--batch", type=int, nargs="+", default=[1, 4], metavar="N", help="at most 4 (default 1 4)"),
        chosen("--policy", list(POLICIES), "default: both"),
        option("--steps", type=int, default=15, help="timed steps of each cell (default 15)"),
        flag("--build-only", "build the engines and measure nothing"),
        output("OUTPUT.json and .svg", "perf/results/shadowkv-speed-cpu", as_json=False),
    ),
    measure=run, merged=("policy", "context", "batch", "hit_rate"), instead=build_only, shown=table, is_plain=True,
    plot=plot,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
