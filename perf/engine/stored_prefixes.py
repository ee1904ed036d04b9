"""Measure the first token of a prompt that an earlier engine left in files beside computing it, and what writing costs.

    python -m perf.engine.stored_prefixes --engine DIR --folder NEW_DIR [--lengths 2000 8000] [--output OUTPUT]

Each prompt is computed, its pages are written, and another engine with an empty pool answers it: with the files in the
system's cache, and after they were dropped from it. The floor is reading the same files without looking at them. Then
prompts without hits are served with files and without, by turns: seconds, and the processor's, the writer's included.
"""

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvforge.manifest import load_manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.sessions.session import Session, load_session
from perf.harness.batch import Batch
from perf.harness.experiment import Experiment, engine_place, number, numbers, output, place, seed


def open_engine(session: Session, folder: Path | None) -> LLMEngine:
    """Return an engine with an empty pool."""
    options: dict[str, Any] = {} if folder is None else {"prefix_dir": folder, "prefix_gib": 8.0}
    return LLMEngine(session=session, kv_cache_gib=1.0, **options)


def serve(engine: LLMEngine, prompts: list[list[int]], output_tokens: int) -> tuple[float, float, list[list[int]]]:
    """Return the seconds until all are answered and until all is written, those of the processor, and the answers."""
    used, batch = time.process_time(), Batch(engine, prompts, output_tokens)
    batch.finish()
    seconds = time.perf_counter() - batch.begun
    engine.close()
    return seconds, time.process_time() - used, batch.tokens


def read_files(folder: Path) -> float:
    """Return the seconds that reading all pages takes."""
    buffer, start = bytearray(1 << 24), time.perf_counter()
    for path in folder.glob("*/*.page"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def drop_from_memory(folder: Path) -> None:
    """Have the next reads come from the disk."""
    for path in folder.glob("*/*.page"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_tokens(session: Session, prompt: list[int], folder: Path) -> dict[str, Any]:
    """Return seconds until the first token, and of the processor: computed, and read by another engine."""
    computed, processor, answer = serve(open_engine(session, folder), [prompt], 1)
    row: dict[str, Any] = {
        "computed_s": computed,
        "computed_processor_s": processor,
        "bytes": sum(p.stat().st_size for p in folder.glob("*/*.page")),
    }
    for name in ("cached", "disk"):
        for kind in ("read", "floor"):
            if name == "disk":
                drop_from_memory(folder)
            if kind == "floor":
                row[f"{name}_floor_s"] = read_files(folder)
                continue
            engine = open_engine(session, folder)
            row[f"{name}_s"], row[f"{name}_processor_s"], again = serve(engine, [prompt], 1)
            row["is_equal"] = row.get("is_equal", True) and again == answer
            row["read_tokens"] = engine.stats()["num_stored_reused_tokens"]
    shutil.rmtree(folder)
    return row


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every length, then prompts without hits; returns the report."""
    manifest = load_manifest(args.engine)
    session, rng = load_session(args.engine, manifest), np.random.default_rng(args.seed)

    def prompt(length: int) -> list[int]:
        return rng.integers(3, manifest.vocab_size, length).tolist()

    serve(open_engine(session, None), [prompt(500)], 2)
    rows = []
    for length in args.lengths:
        runs = [first_tokens(session, prompt(length), args.folder) for _ in range(args.num_runs)]
        row = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        rows.append({"tokens": length, **row, "is_equal": all(run["is_equal"] for run in runs)})
    ratios: dict[str, list[float]] = {"seconds": [], "processor": []}
    for index in range(args.num_batches):
        prompts, runs = [prompt(300) for _ in range(8)], {}
        for keeps in (False, True)[:: 1 if index % 2 else -1]:
            runs[keeps] = serve(open_engine(session, args.folder if keeps else None), prompts, 32)
            shutil.rmtree(args.folder, ignore_errors=True)
        for half, of_kind in enumerate(ratios.values()):
            of_kind.append(runs[False][half] / runs[True][half])
    return {
        "model": f"{manifest.num_parameters / 1e6:.0f}M parameters, {manifest.kv_bytes_per_token} KV bytes a token",
        "rows": rows,
        "throughput_ratio": {kind: statistics.median(of_kind) for kind, of_kind in ratios.items()},
        "throughput_ratios": ratios,
    }


def table(report: dict[str, Any]) -> str:
    """Return the rows as text."""
    lines = [
        f"{row['tokens']:>6} tokens, {row['bytes'] / 2**20:.0f} MiB: computed in {row['computed_s']:.2f} s (processor "
        f"{row['computed_processor_s']:.2f}); read in {row['cached_s']:.3f} s (processor "
        f"{row['cached_processor_s']:.3f}, floor {row['cached_floor_s']:.3f}), from the disk {row['disk_s']:.3f} s "
        f"(floor {row['disk_floor_s']:.3f}); equal: {row['is_equal']}"
        for row in report["rows"]
    ]
    ratios = ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in report["throughput_ratio"].items())
    return "\n".join([*lines, f"throughput without hits, with files to without: {ratios}"])


EXPERIMENT = Experiment(
    "perf.engine.stored_prefixes", __doc__,
    options=(
        engine_place("--engine", "an engine directory", required=True),
        place("--folder", "for pages; it is removed", required=True),
        numbers("--lengths", [2000, 8000], "(default 2000 8000)"),
        number("--num-runs", 3, "medians are reported (default 3)"),
        number("--num-batches", 9, "without hits, of each kind (default 9)"), seed(), output("OUTPUT.json"),
    ),
    measure=measure, shown=table, is_plain=True, is_dated=True,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
