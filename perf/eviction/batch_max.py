"""Batch-Max's experiment (arXiv 2412.05693, section 4): how many sequences fit, and what that is worth.

    python -m perf.eviction.batch_max --output perf/results/batch-max

24 requests of 2048 → 512 tokens, all forced to their full length, on the 213M-parameter model, in a pool of 96 MiB:
with the full cache, with eviction while prompts are computed too, and with eviction once they are (the paper's
baseline). `static`: batches as large as fit are served one after the other, each to its end, as in the paper. `in
flight`: all requests are there and join as there is room, as they are served. Rows take turns.

Bytes of the cache are those that are allocated: pages and the rule's state.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvforge.manifest import Manifest, load_manifest
from kvforge.runtime.config import resolve_config
from kvforge.runtime.engine import LLMEngine
from perf.eviction.engines import PolicyEngine, prepare
from perf.harness.batch import Batch
from perf.harness.experiment import Experiment, Report, lengths, number, output, work
from perf.harness.rounds import medians
from perf.peers.phases import PhaseTimes
from perf.peers.systems import WORK

MAX_SEQ_LEN = 16384
LOAD = ("requests", "input_tokens", "output_tokens", "pool_mib")
SERVED = (
    ("sequences", lambda row: f"{row['sequences']:.0f} (planned {row['planned']:.0f})"),
    ("prefill s", "prefill_s", ".1f"),
)  # fmt: skip
FULL, EVICTS, DECODE = "full cache", "Batch-Max", "evict in decode only"


@dataclass(frozen=True)
class Row:
    """A policy, and whether requests join a batch that runs."""

    name: str
    is_static: bool

    @property
    def label(self) -> str:
        return f"{self.name}, {'static' if self.is_static else 'in flight'}"


ROWS = [Row(name, is_static) for name in (FULL, DECODE, EVICTS) for is_static in (True, False)]


def policies(budget: int, block: int) -> dict[str, str]:
    """Return the policy of each row's name."""
    rule = f"batchmax:budget={budget},block={block}"
    return {FULL: "full", EVICTS: rule, DECODE: f"{rule},decode_only=1"}


def num_sequences(manifest: Manifest, pool_bytes: int, input_tokens: int, output_tokens: int) -> tuple[int, int, int]:
    """Return how many sequences fit while all are at their largest, and the pages and state pages that they take."""
    config = resolve_config(manifest, 0, max_num_seqs=1, num_pages=1 << 16)
    pages, state_pages = config.pages_needed(input_tokens, input_tokens + output_tokens - 1)
    state = manifest.policy.keeping.state_pools(manifest.owner_cache)
    state_bytes = manifest.model.num_owners * sum(
        int(np.prod(pool.shape)) * np.dtype(pool.dtype).itemsize for pool in state if pool.rows == "pages"
    )
    count = pool_bytes // (pages * manifest.page_bytes + state_pages * state_bytes)
    num_pages = (pool_bytes - count * state_pages * state_bytes) // manifest.page_bytes
    return count, num_pages, count * state_pages


def serve(engine: LLMEngine, prompts: np.ndarray, output_tokens: int, at_once: int) -> dict[str, float]:
    """Serve ``prompts`` in groups of ``at_once``; returns times, and how many sequences ran at once."""
    total, most = PhaseTimes(), 0
    for start in range(0, len(prompts), at_once):
        times, running = serve_group(engine, prompts[start : start + at_once], output_tokens)
        most = max(most, running)
        for name in ("total_s", "prefill_s", "decode_s", "decode_rows"):
            setattr(total, name, getattr(total, name) + getattr(times, name))
    tokens = len(prompts) * output_tokens
    return {
        "sequences": most,
        "total_s": total.total_s,
        "prefill_s": total.prefill_s,
        "output_tok_s": tokens / total.total_s,
        "decode_tok_s": total.decode_rows / total.decode_s if total.decode_s else 0.0,
    }


def serve_group(engine: LLMEngine, prompts: np.ndarray, output_tokens: int) -> tuple[PhaseTimes, int]:
    """Serve ``prompts``, all there from the start; returns times and the most sequences that ran in a step."""
    times, most = PhaseTimes(), 0
    batch = Batch(engine, prompts.tolist(), output_tokens)
    while engine.has_unfinished():
        running = len(engine.scheduler.running)  # those of the last step that go on
        count = batch.step()
        times.lap(engine.statistics.num_context_tokens > 0, [0] * count, bool(batch.tokens[0]))
        most = max(most, running)
    return times, most


def pooled(path: Path, args: argparse.Namespace) -> tuple[int, LLMEngine]:
    """Return how many sequences fit a pool of ``args.pool_mib`` at their largest, and an engine that has it, warm."""
    manifest = load_manifest(path)
    fits, pages, state_pages = num_sequences(manifest, args.pool_mib << 20, args.input_tokens, args.output_tokens)
    limits = {"num_pages": pages, "num_state_pages": state_pages or None}
    limits["max_num_seqs"] = min(args.requests, manifest.max_num_seqs)
    engine = LLMEngine(path, enable_prefix_cache=False, **limits)
    serve_group(engine, prompts_of(manifest, args)[:1, :64], 2)
    return fits, engine


def prompts_of(manifest: Manifest, args: argparse.Namespace) -> np.ndarray:
    """Return the requests' prompts."""
    return np.random.default_rng(0).integers(3, manifest.vocab_size, (args.requests, args.input_tokens))


def measure(args: argparse.Namespace) -> Report:
    """Take turns over the rows."""
    texts = policies(args.budget, args.block)
    paths = {name: prepare(args.work, PolicyEngine(text), MAX_SEQ_LEN) for name, text in texts.items()}
    prompts = prompts_of(load_manifest(paths[FULL]), args)
    runs: dict[str, list[dict[str, float]]] = {row.label: [] for row in ROWS}
    for row in ROWS * args.turns:
        fits, engine = pooled(paths[row.name], args)
        found = serve(engine, prompts, args.output_tokens, fits if row.is_static else args.requests)
        runs[row.label].append({"planned": fits} | found)
    rows = {label: medians(found) | {"runs": found} for label, found in runs.items()}
    return {"load": {name: getattr(args, name) for name in LOAD}, "policies": texts, "rows": rows}


def columns(report: Report) -> list[tuple]:
    """Return the table's columns."""
    full = report["rows"][ROWS[1].label]
    return [
        ("", "name"), *SERVED,
        ("decode tok/s", "decode_tok_s", ".1f"), ("whole run s", "total_s", ".1f"),
        ("decode, times full", "decode_tok_s", ".2f", 1 / full["decode_tok_s"]),
        ("run, times full", lambda row: full["total_s"] / row["total_s"], ".2f"),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    "perf.eviction.batch_max", __doc__,
    options=(
        lengths(2048, 512), number("--requests", 24), number("--pool-mib", 96), number("--budget", 512),
        number("--block", 64), number("--turns", 1), work(WORK), output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=measure, title="Batch-Max's experiment", columns=columns,
    notes=lambda report: "{requests} requests of {input_tokens} → {output_tokens} tokens in {pool_mib} MiB; "
        f'`{report["policies"][EVICTS]}`. Medians; "times full" is the full cache in flight.'.format_map(
        report["load"],
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
