"""Decode step time over the context, full attention beside ShadowKV at a fixed budget, on this CPU.

    python -m perf.shadowkv.speed [--context 2048 …] [--batch 1 4] [--work DIR]

A random model of four layers of 8 KV heads x 128, so that attention dominates. Caches are synthetic
(``perf.shadowkv.decode``): a 32K prompt is not computed. The hit rate is set: 0, where every selected chunk is fetched
and rebuilt, and 0.6. Floors are the bytes that a step reads, over the best rate of a plain read measured in the same
run. Rows are kept: a run adds its own to those in OUTPUT.json and draws OUTPUT.svg of all.
"""

import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvforge.common.figures import new_figure, save_figure
from kvforge.compiler import BuildOptions
from kvforge.manifest import Manifest, load_manifest
from kvforge.runtime.sessions.session import load_session
from perf.engine.floors import measure_rates
from perf.harness.command import add_report, add_work, make_parser, run_main
from perf.harness.engines import cached_engine
from perf.harness.files import merge_rows, read_json, write_report
from perf.harness.machine import machine_fields
from perf.harness.random_checkpoint import LLAMA_213M, cached_checkpoint
from perf.harness.tables import markdown_table
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
        rows.append(
            {
                "policy": policy,
                **asdict(load),
                "hit_rate": wanted,
                "measured_hit_rate": measured,
                "step_s": statistics.median(times),
                "best_step_s": min(times),
                "floor_bytes": num_bytes,
                "floor_s": num_bytes / read_rate,
                "cache_bytes": device,
                "host_cache_bytes": host,
            }
        )
    return rows


def name_of(row: dict[str, Any]) -> str:
    """The name of a row's curve."""
    return "full attention" if row["policy"] == "full" else f"ShadowKV, {row['hit_rate']:.0%} hits"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Step time over context, a panel for each batch; dashed: the floor."""
    batches = sorted({row["batch"] for row in rows})
    figure = new_figure(5.5 * len(batches), 4.2)
    for axes, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        chosen = sorted((row for row in rows if row["batch"] == batch), key=lambda row: row["context"])
        for index, name in enumerate(sorted({name_of(row) for row in chosen})):
            line = [row for row in chosen if name_of(row) == name]
            x = [row["context"] for row in line]
            axes.plot(x, [1e3 * row["step_s"] for row in line], "o-", color=f"C{index}", label=name)
            axes.plot(x, [1e3 * row["floor_s"] for row in line], "--", color=f"C{index}", linewidth=1)
        axes.set(xlabel="context, tokens", ylabel="decode step, ms", title=f"batch {batch}", ylim=(0, None))
        axes.set_xticks([row["context"] for row in chosen if row["policy"] == "full"])
        axes.set_xticklabels([f"{row['context'] // 1024}K" for row in chosen if row["policy"] == "full"])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle("Four layers, 8 KV heads x 128, bf16, one CPU; dashed: bytes read over the rate of a plain read")
    save_figure(figure, path)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["batch"], row["context"], name_of(row))):
        size = f"{row['cache_bytes'] / 2**20:.0f}"
        if row["host_cache_bytes"]:
            size += f" + {row['host_cache_bytes'] / 2**20:.0f} host"
        times = f"{1e3 * row['step_s']:.2f}", f"{1e3 * row['floor_s']:.2f}"
        lines.append([row["batch"], row["context"], name_of(row), *times, size])
    return markdown_table(("batch", "context", "cache", "step, ms", "floor, ms", "cache, MiB"), lines) + "\n"


def merge(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all rows, the new one of each cell."""
    return merge_rows(old, new, ("policy", "context", "batch", "hit_rate"))


def main() -> None:
    """Measure and report."""
    parser = make_parser(__doc__)
    add_work(parser, "runs/shadowkv-speed", "checkpoint and engines")
    parser.add_argument("--context", type=int, nargs="+", default=list(CONTEXTS), metavar="N", help="default: all")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], metavar="N", help="at most 4 (default 1 4)")
    parser.add_argument("--policy", nargs="+", choices=list(POLICIES), default=list(POLICIES), help="default: both")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each cell (default 15)")
    parser.add_argument("--build-only", action="store_true", help="build the engines and measure nothing")
    add_report(parser, "OUTPUT.json and .svg", "perf/results/shadowkv-speed-cpu", as_json=False)
    args = parser.parse_args()
    engines = {policy: engine_of(policy, args.work) for policy in args.policy}
    if args.build_only:
        return
    rates = measure_rates()
    rows: list[dict[str, Any]] = []
    cells = [(policy, Load(context, batch)) for batch in args.batch for context in args.context for policy in engines]
    for policy, load in tqdm(cells, unit="cell", disable=None):
        rows += measure(policy, engines[policy], load, args.steps, rates.read)
    rows = merge(read_json(args.output.with_suffix(".json"), {"rows": []})["rows"], rows)
    machine = machine_fields() | {"threads": torch.get_num_threads()}
    content = {"command": "python -m perf.shadowkv.speed", "policies": POLICIES, **machine, "rows": rows}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_report(args.output, content)
    plot(rows, args.output.with_suffix(".svg"))
    print(table(rows))


if __name__ == "__main__":
    sys.exit(run_main(main))
