"""Speed of self-drafts where every draft is right, on a model whose graphs take the time: the bound for its size.

    python -m perf.speculation.self_draft_bound [--work DIR] [--output STEM]

The 213M shape with a cut at 8 of 16 and random weights, of which the upper layers' outputs are zero and the early
exit's head is the LM head: both heads say the same, so all drafts are accepted, and every graph costs what it costs.
L drafts should take (L + 1) times ``lower`` and the exit, and ``upper`` once. Writes OUTPUT.json and .md.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from kvforge.compiler import BuildOptions
from kvforge.manifest import load_manifest
from kvforge.runtime.sessions.session import load_session
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Report, number, numbers, output, work
from perf.harness.random_checkpoint import LLAMA_213M, write_checkpoint
from perf.harness.timed_session import TimedSession
from perf.speculation.early_exit import decode, make_engine, phase

CUT, GROUP, LENGTHS = 8, 4, (0, 1, 2, 4, 6)
NOTHING_ADDED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def engine_of(work: Path) -> Path:
    """Return the engine under ``work``, built if it cannot be loaded (about two minutes)."""
    checkpoint, engine = work / "checkpoint-agreeing-exit", work / "engine-agreeing-exit"

    def make_checkpoint() -> Path:
        write_checkpoint(checkpoint, LLAMA_213M | {"early_exit": True}, CUT, GROUP)
        weights = load_file(checkpoint / "model.safetensors")
        for layer in range(CUT, LLAMA_213M["num_hidden_layers"]):
            for name in NOTHING_ADDED:
                weights[f"model.layers.{layer}.{name}"].zero_()
        weights["lm_head_early_exit.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, checkpoint / "model.safetensors")
        return checkpoint

    options = BuildOptions(dtype="bfloat16", max_num_seqs=8, max_seq_len=1024, max_draft_len=max(LENGTHS))
    return cached_engine(engine, make_checkpoint, options)


def measure(engine_dir: Path, batch: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each draft length, measured in turn."""
    session = TimedSession(load_session(engine_dir, load_manifest(engine_dir)))
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, LLAMA_213M["vocab_size"], (batch, 128)).tolist()
    engines = {length: make_engine(session, {"length": length, "confidence": 0.0}) for length in LENGTHS}
    runs: dict[int, list[dict[str, Any]]] = {length: [] for length in LENGTHS}
    for _ in range(1 + repeats):
        for length, engine in engines.items():
            runs[length].append(decode(engine, session, prompts, 0.0))
    rows = []
    for length, (_, *found) in runs.items():
        run = sorted(found, key=lambda run: run["seconds"])[len(found) // 2]
        stats = engines[length].stats()
        rows.append(
            {
                "batch": batch,
                "drafts": length,
                "tokens_per_s": statistics.median(run["tokens"] / run["seconds"] for run in found),
                "tokens_per_step": run["tokens"] / run["steps"] / batch,
                "acceptance": stats["num_accepted_draft_tokens"] / max(stats["num_draft_tokens"], 1),
                "ms_per_step": 1e3 * run["seconds"] / run["steps"],
                "ms_per_step_in": {name: 1e3 * value / run["steps"] for name, value in run["phases"].items()},
                "same_texts": run["texts"] == runs[0][-1]["texts"],
            }
        )
    return rows


def columns(report: Report) -> list[tuple]:
    """Return the table's columns."""
    plain = {row["batch"]: row["tokens_per_s"] for row in report["rows"] if row["drafts"] == 0}
    return [
        ("batch", "batch"), ("drafts", "drafts"), ("acceptance", "acceptance", ".0%"),
        ("tokens a step", "tokens_per_step", ".2f"), ("ms a step", "ms_per_step", ".2f"),
        *map(phase, ("lower", "early_exit", "upper")), ("tokens/s", "tokens_per_s", ".0f"),
        ("over plain", lambda row: row["tokens_per_s"] / plain[row["batch"]], ".2f"),
        ("same texts", lambda row: "yes" if row["same_texts"] else "no"),
    ]  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every batch."""
    engine = engine_of(args.work)
    with torch.inference_mode():
        return [row for batch in args.batch for row in measure(engine, batch, args.repeats)]


EXPERIMENT = Experiment(
    "perf.speculation.self_draft_bound", __doc__,
    options=(work(), numbers("--batch", [1, 4]), number("--repeats", 5), output("OUTPUT.json and OUTPUT.md")),
    measure=run, notes=f"213M parameters, cut {CUT} of 16, bf16, an exit that agrees with the model.", columns=columns,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
